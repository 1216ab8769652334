"""Check of new layers and memories one layer at a time: each computes what the base computes there."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel

from midus_config.memory_entries import TABLES
from upscalers.architecture.layer_tensors import memories_of
from upscalers.checkpoint.base_model import BaseModel
from upscalers.checkpoint.safetensors_format import TORCH_NAMES, StoredTensor
from upscalers.plan.plan import Base, Plan
from upscalers.request.errors import RequestError, VerificationError, one_line
from upscalers.request.progress import Progress
from upscalers.runs.streamed_model import read_tensor

_BATCH, _TOKENS = 2, 16


@dataclass(frozen=True)
class _Layers:
    """The layers of a model, to be run one at a time, each on its own.

    Args:
        config: As transformers reads it.
        model: Opened; the upscaled model's tensors may be those that were just written.
        dtype: To run in.
    """

    config: Any
    model: BaseModel
    dtype: torch.dtype

    def output(self, layer: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """What a layer makes of hidden states `[B, T, D]`."""
        try:
            with torch.device("meta"):
                model = AutoModel.from_config(_single_layer(self.config, layer), dtype=self.dtype)
            model.rotary_emb = type(model.rotary_emb)(model.config)
        except Exception as error:
            raise RequestError(
                f"transformers cannot build a model from the config ({type(error).__name__}: {one_line(error)}). "
                "Repair config.json of the base."
            ) from None
        try:
            state = self._state(self.model.new_name(layer, ""))
            own = self.model.layer_tensors(layer)  # a layer of the base may hold more, which is carried along
            model.layers[0].load_state_dict({name: state[name] for name in own if name in state}, assign=True)
            for entry in self.model.memories.attached_to(layer):
                for number, shared in enumerate(self.model.memories.tables(entry.name)):
                    if layer in shared.layers:
                        state = self._state(f"{self.model.prefix}{TABLES}.{entry.name}.{number}.")
                        model.memory_tables[entry.name]["0"].load_state_dict(state, assign=True)
        except RuntimeError as error:
            raise VerificationError(f"new layer {layer} does not load as it was saved: {one_line(error)}") from None
        model.norm = torch.nn.Identity()
        try:
            with torch.no_grad():
                return model.eval()(inputs_embeds=hidden_states, use_cache=False).last_hidden_state
        except Exception as error:
            raise RequestError(
                f"transformers cannot run a layer of this config ({type(error).__name__}: {one_line(error)}). "
                "Repair config.json of the base."
            ) from None

    def _state(self, prefix: str) -> dict[str, torch.Tensor]:
        return {
            name.removeprefix(prefix): read_tensor(place, self.dtype)
            for name, place in self.model.tensors.items()
            if name.startswith(prefix)
        }


def check_blocks(
    folder: Path,
    config: dict[str, Any],
    base: BaseModel,
    plan: Plan,
    tensors: Mapping[str, StoredTensor],
    dtype: str,
    progress: Progress,
) -> None:
    """Check each layer that is new or has a new memory on random hidden states, bit for bit, with one layer in memory at a time.

    A new layer maps them to themselves; a layer to which memory was attached gives what the base's layer gives.

    Args:
        folder: The upscaled checkpoint.
        config: Its raw config.
        base: The base.
        plan: Where its layers come from.
        tensors: Its tensors, by full name.
        dtype: The container's name of the dtype to run in.
        progress: Told of every layer.

    Raises:
        RequestError: If transformers cannot build a layer from the config, or not run it.
        VerificationError: If a layer computes anything else.
    """
    upscaled = BaseModel(folder, config, base.family, dict(tensors))
    memories = memories_of(base.family, config)
    attached = {layer for name in plan.new_memories for layer in memories.attached[name].layers}
    checked = sorted({*plan.new_indices, *attached})
    progress.stage("checking the new blocks", len(checked), "blocks")
    torch_dtype = getattr(torch, TORCH_NAMES[dtype])
    layers = _Layers(AutoConfig.from_pretrained(folder, local_files_only=True), upscaled, torch_dtype)
    layers_of_base = None
    if attached:
        native = AutoConfig.from_pretrained(base.folder, local_files_only=True, trust_remote_code=False)
        layers_of_base = _Layers(native, base, torch_dtype)
    generator = torch.Generator().manual_seed(0)
    for index in checked:
        shape = (_BATCH, _TOKENS, config["hidden_size"])
        hidden_states = torch.randn(shape, generator=generator, dtype=torch.float32).to(torch_dtype)
        output, expected, change = layers.output(index, hidden_states), hidden_states, "random hidden states"
        layer = plan.layers[index]
        if index in attached:
            assert layers_of_base is not None and isinstance(layer, Base)
            expected, change = layers_of_base.output(layer.index, hidden_states), "what the base's layer gives"
        if output.isnan().any() and not expected.isnan().any():
            raise VerificationError(
                f"new layer {index} gives NaN: what it takes from the base holds NaN or infinite weights, or overflows. "
                "Repair the base."
            )
        if not torch.equal(output, expected):
            difference = (output.double() - expected.double()).abs().max().item()
            raise VerificationError(
                f"new layer {index} changes {change} by up to {difference:g}; expected no change at all."
            )
        progress.advance()


def _single_layer(config: Any, index: int) -> Any:
    values = config.to_dict()
    values.pop("auto_map", None)
    values["num_hidden_layers"] = 1
    if values.get("layer_types"):
        values["layer_types"] = [values["layer_types"][index]]
    if "memory" in values:
        values["memory"] = [
            {**entry, "layers": [0], **({"into": [0]} if "into" in entry else {})}
            for entry in values["memory"]
            if index in entry["layers"]
        ]
    return type(config)(**values)

"""Check of new layers and memories, one layer at a time: each computes what the base computes in the same position."""

import zlib
from collections.abc import Mapping
from functools import singledispatch
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel

from midus_hf.config.declared_tensors import ZEROS
from midus_hf.config.memories.depth_attention import DepthAttentionOptions
from midus_hf.config.memory_entries import TABLES, Memories
from midus_hf.config.memory_types import MemoryOptions
from midus_hf.config.model_sizes import ModelSizes
from upscalers.architecture.layer_tensors import memories_of
from upscalers.checkpoint.base_model import BaseModel
from upscalers.checkpoint.computed_tensor import read_tensor
from upscalers.checkpoint.safetensors_format import TORCH_NAMES, StoredTensor
from upscalers.plan.plan import Base, Plan
from upscalers.request.errors import RequestError, VerificationError, one_line
from upscalers.request.progress import Progress
from upscalers.runs.streamed_model import inputs_of_memories, language_config_in, path_of_last_leaf, raised_in_memory

_BATCH, _TOKENS = 2, 16


class _PassedBy(torch.nn.Module):
    """Stand-in for a layer that is not checked."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return the residual stream unchanged."""
        return hidden_states


class _Given(torch.nn.Module):
    """A layer that gets random values for the inputs that it would take from earlier layers, which are skipped."""

    def __init__(self, layer: Any, memories: Memories, new: tuple[str, ...]):
        super().__init__()
        self.layer: Any = layer
        self._memories, self._new = memories, new

    def forward(self, hidden_states: torch.Tensor, *, memory_inputs: Any, **kwargs: Any) -> torch.Tensor:
        """Run the layer with random inputs from earlier layers."""
        batch, tokens, _ = hidden_states.shape
        # Inputs are the same in the base and in the upscaled model, and zero where a new memory promises to leave them zero.
        for carried in self.layer.takes:
            entry, sizes = self._memories.attached[carried.name], self._memories.sizes
            index = entry.layers.index(carried.layer)
            generator = torch.Generator().manual_seed(zlib.crc32(f"{carried.name} {index} {carried.part}".encode()))
            shape = given_shape(entry.options, carried.part, sizes, batch, tokens)
            random = torch.rand(shape, generator=generator, dtype=torch.float32).to(hidden_states.dtype)
            memory_inputs.carry((carried,), (random.zero_() if self._is_zero(carried) else random,))
        output = self.layer(hidden_states, memory_inputs=memory_inputs, **kwargs)
        for carried in self.layer.gives:
            if self._is_zero(carried) and memory_inputs.carried((carried,))[0].any():
                raise VerificationError(
                    f"new memory {carried.name!r} of layer {carried.layer} gives later layers {carried.part} other than zero; "
                    "expected zero until it is trained."
                )
        return output

    def _is_zero(self, carried: Any) -> bool:
        options = self._memories.attached[carried.name].options
        return carried.name in self._new and starts_at_zero(options, carried.part)


@singledispatch
def given_shape(options: MemoryOptions, name: str, sizes: ModelSizes, batch: int, tokens: int) -> tuple[int, ...]:
    """Return the shape of a tensor that a layer passes on to later layers, by a function that its type has registered.

    Args:
        options: Options of the memory.
        name: A name that `gives` returns for the layer.
        sizes: Sizes of the model.
        batch: B, sequences in the batch.
        tokens: T, tokens per sequence.
    """
    raise AssertionError(f"memory type {options.type!r} gives no {name!r}")


@given_shape.register
def _(options: DepthAttentionOptions, name: str, sizes: ModelSizes, batch: int, tokens: int) -> tuple[int, ...]:
    return (batch, sizes.num_key_value_heads, tokens, sizes.head_dim)


@singledispatch
def starts_at_zero(options: MemoryOptions, name: str) -> bool:
    """Return whether a tensor that layers pass on is zero for every input before training. Default: False."""
    return False


@starts_at_zero.register
def _(options: DepthAttentionOptions, name: str) -> bool:
    source, _, part = name.rpartition("_")
    return source in options.projected and options.initial(part) == ZEROS


class _Layers:
    """The layers of a model, to be run one at a time, while all other layers are skipped and hold no weights."""

    def __init__(self, config: Any, model: BaseModel, dtype: torch.dtype, new_memories: tuple[str, ...] = ()):
        self._model, self._dtype, self._new_memories = model, dtype, new_memories
        try:
            with torch.device("meta"):
                self._stack: Any = AutoModel.from_config(_adding_where_it_reads(config), dtype=dtype)
            self._stack.rotary_emb = type(self._stack.rotary_emb)(self._stack.config)
        except Exception as error:
            raise RequestError(
                f"transformers cannot build a model from the config ({type(error).__name__}: {one_line(error)}). "
                "Repair config.json of the base."
            ) from None
        self._stack.norm = torch.nn.Identity()
        self._path = path_of_last_leaf(config)
        if self._path is not None:
            self._stack.open_banks(model.folder)
        self._layers = list(self._stack.layers)
        for index in range(len(self._layers)):
            self._stack.layers[index] = _PassedBy()

    def output(self, index: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the output of a layer for hidden states `[B, T, D]`, with the same shape."""
        layer = self._layers[index]
        tables = {
            f"{self._model.prefix}{TABLES}.{entry.name}.{number}.": self._stack.memory_tables[entry.name][str(number)]
            for entry in self._model.memories.attached_to(index)
            for number, shared in enumerate(self._model.memories.tables(entry.name))
            if index in shared.layers
        }
        try:
            state = self._state(self._model.new_name(index, ""))
            # A layer of the base may hold further tensors, which upscaling copies.
            own = self._model.layer_tensors(index)
            layer.load_state_dict({name: state[name] for name in own if name in state}, assign=True)
            for prefix, shared_tables in tables.items():
                shared_tables.load_state_dict(self._state(prefix), assign=True)
        except RuntimeError as error:
            raise VerificationError(f"new layer {index} does not load as it was saved: {one_line(error)}") from None
        self._stack.layers[index] = (
            _Given(layer, self._stack.config.memories(), self._new_memories)
            if getattr(layer, "takes", ()) or getattr(layer, "gives", ())
            else layer
        )
        try:
            with torch.no_grad():
                inputs = inputs_of_memories(self._stack, self._path, hidden_states)
                return self._stack.eval()(inputs_embeds=hidden_states, use_cache=False, **inputs).last_hidden_state
        except VerificationError:
            raise
        except Exception as error:
            in_memory = raised_in_memory(error)
            if in_memory is not None:
                raise VerificationError(
                    f"{in_memory}. Its layer was run alone, on random hidden states without token ids; where it needs a whole model, "
                    "pass --verify. Otherwise mend the memory."
                ) from None
            raise RequestError(
                f"transformers cannot run a layer of this config ({type(error).__name__}: {one_line(error)}). "
                "Repair config.json of the base, or the module of a memory of another package."
            ) from None
        finally:
            self._stack.layers[index] = _PassedBy()
            for loaded in (layer, *tables.values()):
                loaded.to("meta")

    def _state(self, prefix: str) -> dict[str, torch.Tensor]:
        return {
            name.removeprefix(prefix): read_tensor(stored, self._dtype)
            for name, stored in self._model.tensors.items()
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
    """Check layers that are new or have a new memory, bit for bit on random hidden states, one layer in memory at a time.

    A new layer must return its input. A layer with a new attached memory must return what the base's layer returns.

    Args:
        folder: Folder of the upscaled checkpoint.
        config: Raw config of the upscaled checkpoint.
        base: The base checkpoint.
        plan: The layer plan.
        tensors: Tensors of the upscaled checkpoint, by full name.
        dtype: Dtype to run in, as safetensors names it.
        progress: Display that shows every layer.

    Raises:
        RequestError: If transformers cannot build a layer from the config, or cannot run it.
        VerificationError: If a layer computes anything else.
    """
    upscaled = BaseModel(folder, config, base.family, dict(tensors))
    memories = memories_of(base.family, config)
    attached = {layer for name in plan.new_memories for layer in memories.attached[name].layers}
    checked = sorted({*plan.new_indices, *attached})
    progress.stage("checking the new blocks", len(checked), "blocks")
    torch_dtype = getattr(torch, TORCH_NAMES[dtype])
    upscaled_config = language_config_in(folder)
    layers = _Layers(upscaled_config, upscaled, torch_dtype, tuple(plan.new_memories))
    layers_of_base = None
    if attached:
        layers_of_base = _Layers(language_config_in(base.folder), base, torch_dtype)
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


def _adding_where_it_reads(config: Any) -> Any:
    """Return the config, changed so that memories that skip layers add their output where they read: other layers do not run."""
    values = config.to_dict()
    values.pop("auto_map", None)
    if "memory" in values:
        values["memory"] = [
            {**entry, **({"into": entry["layers"]} if "into" in entry else {})} for entry in values["memory"]
        ]
    return type(config)(**values)

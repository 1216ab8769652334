"""Check of new layers one by one: each maps its input to itself."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel

from upscalers.architecture.families import Config
from upscalers.checkpoint.safetensors_format import TORCH_NAMES, StoredTensor
from upscalers.request.errors import RequestError, VerificationError, one_line
from upscalers.request.progress import Progress
from upscalers.runs.streamed_model import read_tensor

_BATCH, _TOKENS = 2, 16


def check_blocks(
    folder: Path,
    config: Config,
    new_layers: dict[int, str],
    tensors: dict[str, StoredTensor],
    dtype: str,
    progress: Progress,
) -> None:
    """Check that each new block maps random hidden states to themselves, bit for bit, one block in memory at a time.

    Args:
        folder: The upscaled checkpoint.
        config: Its raw config.
        new_layers: The new layers, by index: what the names of their tensors begin with.
        tensors: Its tensors, by full name.
        dtype: The container's name of the dtype to run in.
        progress: Told of every block.

    Raises:
        RequestError: If transformers cannot build a block from the config, or not run it.
        VerificationError: If a block changes its input.
    """
    progress.stage("checking the new blocks", len(new_layers), "blocks")
    torch_dtype = getattr(torch, TORCH_NAMES[dtype])
    full_config = AutoConfig.from_pretrained(folder, local_files_only=True)
    generator = torch.Generator().manual_seed(0)
    for index, prefix in new_layers.items():
        try:
            with torch.device("meta"):
                model = AutoModel.from_config(_single_layer(full_config, index), dtype=torch_dtype)
            model.rotary_emb = type(model.rotary_emb)(model.config)
        except Exception as error:
            raise RequestError(
                f"transformers cannot build a model from the config ({type(error).__name__}: {one_line(error)}). "
                "Repair config.json of the base."
            ) from None
        block = model.layers[0]
        state = {
            name.removeprefix(prefix): read_tensor(place).to(torch_dtype)
            for name, place in tensors.items()
            if name.startswith(prefix)
        }
        try:
            block.load_state_dict(state, assign=True)
        except RuntimeError as error:
            raise VerificationError(f"new layer {index} does not load as it was saved: {one_line(error)}") from None
        model.norm = torch.nn.Identity()
        hidden_states = torch.randn(
            _BATCH, _TOKENS, config["hidden_size"], generator=generator, dtype=torch.float32
        ).to(torch_dtype)
        try:
            with torch.no_grad():
                output = model.eval()(inputs_embeds=hidden_states, use_cache=False).last_hidden_state
        except Exception as error:
            raise RequestError(
                f"transformers cannot run a layer of this config ({type(error).__name__}: {one_line(error)}). "
                "Repair config.json of the base."
            ) from None
        if output.isnan().any():
            raise VerificationError(
                f"new layer {index} gives NaN: what it takes from the base holds NaN or infinite weights, or overflows. "
                "Repair the base."
            )
        if not torch.equal(output, hidden_states):
            difference = (output.double() - hidden_states.double()).abs().max().item()
            raise VerificationError(
                f"new layer {index} changes random hidden states by up to {difference:g}; expected no change at all."
            )
        progress.advance()


def _single_layer(config: Any, index: int) -> Any:
    values = config.to_dict()
    values.pop("auto_map", None)
    values["num_hidden_layers"] = 1
    if values.get("layer_types"):
        values["layer_types"] = [values["layer_types"][index]]
    if "memory" in values:
        values["memory"] = [{**entry, "layers": [0]} for entry in values["memory"] if index in entry["layers"]]
    return type(config)(**values)

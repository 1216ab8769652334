"""Verification: the upscaled model computes what the base computes, or each new block maps its input to itself."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upscalers.engine.errors import RequestError, VerificationError, one_line
from upscalers.engine.families import Config
from upscalers.engine.safetensors_format import TORCH_NAMES, StoredTensor

if TYPE_CHECKING:
    import torch

_BATCH, _TOKENS, _BLOCK_TOKENS = 2, 64, 16


@dataclass(frozen=True)
class LogitDifference:
    """How far two models' predictions are apart.

    Args:
        max_abs_diff: The largest absolute difference between logits.
        kl_divergence: From the first's next-token distribution to the second's, mean over tokens, in nats.
    """

    max_abs_diff: float
    kl_divergence: float


def compare_logits(base_folder: Path, new_folder: Path, dtype: str, identity: bool) -> LogitDifference:
    """Run both models on a fixed batch.

    Args:
        base_folder: The base.
        new_folder: The upscaled model.
        dtype: The container's name of the dtype to run in.
        identity: Whether the method promises equality.

    Returns:
        The difference between their predictions.

    Raises:
        RequestError: If transformers cannot run the base.
        VerificationError: If a tensor was not loaded as saved, or identity is promised and a logit differs.
    """
    import midus_hf  # noqa: F401 - registers the classes

    try:
        base_logits = _logits(base_folder, dtype)
    except Exception as error:
        raise RequestError(
            f"transformers cannot run the base ({type(error).__name__}: {one_line(error)}). Repair it or download it again; where "
            "it only does not fit in memory, pass --no-verify."
        ) from None
    new_logits = _logits(new_folder, dtype)
    if ((base_logits == new_logits) | (base_logits.isnan() & new_logits.isnan())).all():
        return LogitDifference(0.0, 0.0)
    difference = (base_logits.double() - new_logits.double()).abs().max().item()
    if identity:
        raise VerificationError(
            f"the upscaled model's logits differ from the base's by up to {difference:g}; expected a difference of exactly 0."
        )
    base_log, new_log = base_logits.double().log_softmax(-1), new_logits.double().log_softmax(-1)
    return LogitDifference(difference, (base_log.exp() * (base_log - new_log)).sum(-1).mean().item())


def _logits(folder: Path, dtype: str) -> "torch.Tensor":
    import torch
    from transformers import AutoModelForCausalLM

    with _without_loading_bar():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, TORCH_NAMES[dtype]), local_files_only=True, output_loading_info=True
        )
    model, info = loaded
    wrong = sorted(info["missing_keys"]) + sorted(map(str, info["mismatched_keys"]))
    if wrong:
        raise VerificationError(
            f"{folder.name} loads without {', '.join(wrong[:3])}; expected every tensor in its place."
        )
    vocabulary = model.config.vocab_size
    tokens = torch.randint(0, vocabulary, (_BATCH, _TOKENS), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.eval()(tokens, use_cache=False).logits


@contextlib.contextmanager
def _without_loading_bar() -> Iterator[None]:
    """Keep transformers from drawing a bar of its own into the command's."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def check_blocks(
    folder: Path, config: Config, new_layers: dict[int, str], tensors: dict[str, StoredTensor], dtype: str
) -> None:
    """Check that each new block maps random hidden states to themselves, bit for bit, one block in memory at a time.

    Args:
        folder: The upscaled checkpoint.
        config: Its raw config.
        new_layers: The new layers, by index: what the names of their tensors begin with.
        tensors: Its tensors, by full name.
        dtype: The container's name of the dtype to run in.

    Raises:
        RequestError: If transformers cannot build a block from the config, or not run it.
        VerificationError: If a block changes its input.
    """
    import torch
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModel

    import midus_hf  # noqa: F401 - registers the classes

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
        names = {name.removeprefix(prefix): name for name in tensors if name.startswith(prefix)}
        state = {}
        for key, name in names.items():
            with safe_open(tensors[name].file, framework="pt") as file:
                state[key] = file.get_tensor(name).to(torch_dtype)
        try:
            block.load_state_dict(state, assign=True)
        except RuntimeError as error:
            raise VerificationError(f"new layer {index} does not load as it was saved: {one_line(error)}") from None
        model.norm = torch.nn.Identity()
        hidden_states = torch.randn(
            _BATCH, _BLOCK_TOKENS, config["hidden_size"], generator=generator, dtype=torch.float32
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


def _single_layer(config: Any, index: int) -> Any:
    values = config.to_dict()
    values.pop("auto_map", None)
    values["num_hidden_layers"] = 1
    if values.get("layer_types"):
        values["layer_types"] = [values["layer_types"][index]]
    if "memory" in values:
        values["memory"] = [{**entry, "layers": [0]} for entry in values["memory"] if index in entry["layers"]]
    return type(config)(**values)

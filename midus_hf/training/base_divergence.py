"""Divergence of a model from its base on the text it learns, without next tokens (arXiv:2605.29498).

The base is the model with everything that trains switched off: one more forward pass per step, without gradients.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from midus_hf.config.errors import RequestError
from midus_hf.data.packing import IGNORED_LABEL
from midus_hf.evaluation.text_rows import evaluating
from midus_hf.models.view import ModelView, has_adapters, switched_off

_TOKENS_AT_A_TIME = 256


def divergence_without_target(logits: torch.Tensor, base_logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum over the predicted tokens of KL(base || model) in nats, both without the next token.

    Both distributions are normalised without that token: learning it costs nothing, moving the others does. Distributions are
    recomputed in the backward pass, so only those of 256 tokens are held at a time. The sum has at least float32. Logits are
    `[B, T, V]`, those of the base get no gradient; `labels` are `[B, T]`, -100 for tokens that are not learned.
    """
    rows, positions = (labels[:, 1:] != IGNORED_LABEL).nonzero(as_tuple=True)  # [N]
    total = torch.zeros((), dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
    for row, position in zip(rows.split(_TOKENS_AT_A_TIME), positions.split(_TOKENS_AT_A_TIME), strict=True):
        arguments = (logits, base_logits.detach(), labels, row, position)
        total = total + checkpoint(_divergence_at, *arguments, use_reentrant=False, preserve_rng_state=False)
    return total


def _divergence_at(logits: Any, base_logits: Any, labels: Any, row: Any, position: Any) -> torch.Tensor:
    targets = labels[row, position + 1][:, None]  # [N, 1]

    def log_rest(logits: torch.Tensor) -> torch.Tensor:
        chosen = logits[row, position]
        chosen = chosen.to(torch.promote_types(chosen.dtype, torch.float32))
        # The lowest finite number: an infinite one times probability 0 would be NaN.
        return chosen.scatter(1, targets, torch.finfo(chosen.dtype).min).log_softmax(1)  # [N, V]

    return F.kl_div(log_rest(logits), log_rest(base_logits), reduction="sum", log_target=True)


def check_base_divergence(trainer: Any) -> None:
    """Refuse a Trainer's model unless it computes as its base when all that trains is switched off."""
    model = trainer.model
    view = ModelView(trainer.model)
    reason = ""
    is_shared = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    if model.get_output_embeddings() is None:
        reason = "the model has no language model's head; expected a causal language model."
    elif is_shared or getattr(trainer.accelerator, "parallelism_config", None):
        reason = (
            "the processes share parameters, or run DeepSpeed; expected processes that hold whole models. Start the run with "
            "configs/accelerate/ddp.yaml."
        )
    elif has_adapters(model):
        # What trains outside of adapters is not switched off with them.
        if any(getattr(config, "bias", "none") != "none" for config in model.peft_config.values()):
            reason = "adapters.bias trains biases of the base; expected none. Leave bias out."
        elif getattr(getattr(model.get_base_model(), "banks", None), "trainable", False):
            reason = "the blocks of a bank train with the adapters; expected only adapters. Set adapters.layers: all."
    else:
        added = {id(parameter) for module in view.new_modules.values() for parameter in module.parameters()}
        trained = ((name, id(each)) for name, each in model.named_parameters() if each.requires_grad)
        name = next((name for name, number in trained if number not in added), None)
        if name is not None:
            reason = f"base parameter {name} trains; expected only added ones. Set trainable: new, or adapters."
        elif not view.record.has_whole_base:
            reason = "the model lacks layers of its base, or repeats some; expected each once. Leave base_kl out."
    if reason:
        raise RequestError(f"base_kl is {trainer.args.base_kl:g}, and {reason}")


@contextlib.contextmanager
def run_as_base(model: Any) -> Iterator[None]:
    """Let a model compute as its base within the context: without adapters, or else without added parts."""
    with model.disable_adapter() if has_adapters(model) else switched_off(model, ModelView(model).parts):
        yield


def base_logits(model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Return the base's logits for a training step, `[B, T, V]`, in eval mode and without gradients."""
    with run_as_base(model), evaluating(model):
        logits: torch.Tensor = model(**{key: value for key, value in inputs.items() if key != "labels"}).logits
    return logits

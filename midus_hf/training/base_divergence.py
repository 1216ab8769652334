"""The divergence of a model from its base on the text that it learns, without the tokens that are learned (arXiv:2605.29498).

The base is the model itself with everything that trains switched off, so no second model is loaded; a step costs one more
forward pass, without gradients.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from midus_hf.config.errors import RequestError
from midus_hf.data.packing import IGNORED_LABEL
from midus_hf.evaluation.text_rows import evaluating
from midus_hf.models.view import ModelView, switched_off
from midus_hf.training.parallel import shares_parameters

if TYPE_CHECKING:
    # For type checkers: mixins call the methods of the Trainer that they are mixed into.
    from transformers import Trainer as AnyTrainer
else:
    AnyTrainer = object

_TOKENS_AT_A_TIME = 256


class BaseDivergenceMixin(AnyTrainer):
    """Mixin for any kind of `Trainer`: the key `base_kl` of its arguments, if they have it and it is not 0."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.base_kl: float = getattr(self.args, "base_kl", 0.0)
        if self.base_kl:
            check_base_divergence(self)
        # Since the last log event: the divergence from the base in each batch of this process, in nats per token.
        self._divergences: list[torch.Tensor] = []

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss as `Trainer.compute_loss` does; in training with `base_kl` times the divergence from the base."""
        if not self.base_kl or not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        labels = inputs["labels"]
        base = base_logits(self.accelerator.unwrap_model(model, keep_torch_compile=False), inputs)
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        divergence = divergence_without_target(outputs.logits, base, labels)
        tokens = (labels[:, 1:] != IGNORED_LABEL).sum().clamp(min=1)
        self._divergences.append(divergence.detach() / tokens)
        # Per token as the loss is: of all batches and processes whose gradients are summed, or of this one.
        is_summed = num_items_in_batch is not None and (self.model_accepts_loss_kwargs or self.compute_loss_func)
        divergence = divergence / (num_items_in_batch if is_summed else tokens)
        if is_summed and self.args.average_tokens_across_devices:
            divergence = divergence * (self.accelerator.num_processes if self.args.n_gpu <= 1 else self.args.n_gpu)
        loss = loss + self.base_kl * divergence
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as `Trainer.log` does; beside a training loss also `base_divergence`, in nats per token, if it was computed."""
        if self._divergences and "loss" in logs:
            mean = torch.stack(self._divergences).mean()
            logs["base_divergence"] = self.accelerator.gather(mean[None]).mean().item()
            self._divergences.clear()
        super().log(logs, *args, **kwargs)


def divergence_without_target(logits: torch.Tensor, base_logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum over the predicted tokens of KL(base || model) in nats, both without the token that comes next.

    The probability of that token is removed from both distributions, and the rest is normalised: learning the token costs
    nothing, and moving the others does. Distributions are computed again in the backward pass, so that only those of
    256 tokens are held at a time.

    Args:
        logits: Logits of the model, `[B, T, V]`.
        base_logits: Logits of the base, `[B, T, V]`; they get no gradient.
        labels: Token ids, `[B, T]`; the token at t is predicted at t - 1. -100 marks tokens that are not learned.

    Returns:
        The sum, a scalar, in float32, or in the dtype of the logits if that is wider.
    """
    rows, positions = (labels[:, 1:] != IGNORED_LABEL).nonzero(as_tuple=True)  # [N]
    total = torch.zeros((), dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
    for row, position in zip(rows.split(_TOKENS_AT_A_TIME), positions.split(_TOKENS_AT_A_TIME), strict=True):
        arguments = (logits, base_logits.detach(), labels, row, position)
        total = total + checkpoint(_divergence_at, *arguments, use_reentrant=False, preserve_rng_state=False)
    return total


def _divergence_at(logits: Any, base_logits: Any, labels: Any, row: Any, position: Any) -> torch.Tensor:
    """Return the sum of the divergences at some positions of some rows, [N] each."""
    targets = labels[row, position + 1][:, None]  # [N, 1]

    def log_rest(logits: torch.Tensor) -> torch.Tensor:
        chosen = logits[row, position]
        chosen = chosen.to(torch.promote_types(chosen.dtype, torch.float32))
        # The lowest finite number: the product of an infinite one and the probability 0 would be NaN.
        return chosen.scatter(1, targets, torch.finfo(chosen.dtype).min).log_softmax(1)  # [N, V]

    return F.kl_div(log_rest(logits), log_rest(base_logits), reduction="sum", log_target=True)


def check_base_divergence(trainer: Any) -> None:
    """Raise a `RequestError` unless a Trainer's model computes as its base does when all that trains is switched off."""
    reason = _refusal(trainer)
    if reason is not None:
        raise RequestError(f"base_kl is {trainer.args.base_kl:g}, and {reason}")


def _refusal(trainer: Any) -> str | None:
    """Return why a Trainer's model cannot be compared with its base, or None."""
    model, view = trainer.model, ModelView(trainer.model)
    if model.get_output_embeddings() is None:
        return "the model has no language model's head; expected a causal language model."
    if (
        trainer.is_deepspeed_enabled
        or shares_parameters(trainer)
        or getattr(trainer.accelerator, "parallelism_config", None)
    ):
        return (
            "the processes share parameters, or run DeepSpeed; expected processes that hold whole models. Start the run with "
            "configs/accelerate/ddp.yaml."
        )
    if view.has_adapters:
        # What trains outside of adapters is not switched off with them.
        if any(getattr(config, "bias", "none") != "none" for config in model.peft_config.values()):
            return "adapters.bias trains biases of the base; expected none. Leave bias out."
        if getattr(getattr(model.get_base_model(), "banks", None), "trainable", False):
            return "the blocks of a bank train beside adapters; expected adapters alone. Set adapters.layers: all."
        return None
    added = {id(parameter) for module in view.new_modules.values() for parameter in module.parameters()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in added:
            return f"{name}, which is the base's, trains; expected added parameters alone. Set trainable: new, or adapters."
    if not view.record.has_whole_base:
        return "the model lacks layers of its base, or repeats them; expected each once, in their order. Leave base_kl out."
    return None


@contextlib.contextmanager
def run_as_base(model: Any) -> Iterator[None]:
    """Let a model compute as its base does within the context: without its adapters, or else without all that upscaling added."""
    view = ModelView(model)
    with model.disable_adapter() if view.has_adapters else switched_off(model, view.parts):
        yield


def base_logits(model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Return the logits of a model's base for the inputs of a training step, `[B, T, V]`, in eval mode and without gradients."""
    with run_as_base(model), evaluating(model):
        logits: torch.Tensor = model(**{key: value for key, value in inputs.items() if key != "labels"}).logits
    return logits

"""Where the routers of a model tell what they did in one forward pass."""

from typing import NamedTuple

import torch


class Routed(NamedTuple):
    """What one router did.

    Args:
        logits: `[S, C]`, float32 at least, of each stretch of tokens that was routed as one.
        loss: A scalar, what the router adds to the loss of the model.
    """

    logits: torch.Tensor
    loss: torch.Tensor


class RouterReports:
    """What all routers did in one forward pass; a layer that activation checkpointing repeats tells the same again.

    Args:
        needs_gradient: Whether their losses train. Default: false.
    """

    def __init__(self, needs_gradient: bool = False):
        self.needs_gradient = needs_gradient
        self._of_layer: dict[tuple[int, str], Routed] = {}

    def of(self, name: str, layer: int) -> "RouterReport":
        """Where the memory of a name in a layer reports."""
        return RouterReport(self, name, layer)

    def tell(self, name: str, layer: int, routed: Routed) -> None:
        """Note what a router did."""
        self._of_layer[layer, name] = routed

    def logits(self) -> tuple[torch.Tensor, ...]:
        """Logits of all routers, by layer."""
        return tuple(routed.logits for _, routed in sorted(self._of_layer.items(), key=lambda item: item[0]))

    def loss(self) -> torch.Tensor | None:
        """For each memory the mean loss of its layers, all added up; None without a router."""
        losses: dict[str, list[torch.Tensor]] = {}
        for (_, name), routed in sorted(self._of_layer.items(), key=lambda item: item[0]):
            losses.setdefault(name, []).append(routed.loss)
        means = [
            torch.stack([loss.to(of_memory[0].device) for loss in of_memory]).mean() for of_memory in losses.values()
        ]
        return torch.stack([mean.to(means[0].device) for mean in means]).sum() if means else None


class RouterReport:
    """Where one router of them reports.

    Args:
        reports: Of the pass.
        name: Of its memory.
        layer: That it is in.
    """

    def __init__(self, reports: RouterReports, name: str, layer: int):
        self._reports, self._name, self._layer = reports, name, layer

    def tell(self, logits: torch.Tensor, loss: torch.Tensor) -> None:
        """Note logits `[S, C]` and the loss, a scalar.

        Raises:
            ValueError: If no gradient would reach the router, as under reentrant activation checkpointing.
        """
        if self._reports.needs_gradient and not torch.is_grad_enabled():
            raise ValueError(
                f"the router of memory {self._name!r} in layer {self._layer} runs without gradients in a pass that trains, as under "
                "reentrant activation checkpointing; expected gradient_checkpointing_kwargs={'use_reentrant': False}."
            )
        self._reports.tell(self._name, self._layer, Routed(logits, loss))

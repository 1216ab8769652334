"""Reports of a model's routers on one forward pass."""

from typing import NamedTuple

import torch


class Routed(NamedTuple):
    """Report of one router.

    Args:
        logits: `[S, C]`, float32 at least, for each stretch of tokens that was routed as one.
        loss: A scalar that the router adds to the loss of the model.
    """

    logits: torch.Tensor
    loss: torch.Tensor


class RouterReports:
    """Reports of all routers on one forward pass; a layer repeated by activation checkpointing replaces its report by an equal one.

    Args:
        needs_gradient: Whether the routers' losses need gradients. Default: false.
    """

    def __init__(self, needs_gradient: bool = False):
        self.needs_gradient = needs_gradient
        self._of_layer: dict[tuple[int, str], Routed] = {}

    def of(self, name: str, layer: int) -> "RouterReport":
        """Return the report to which a memory in a layer writes, by the memory's name and the layer's index."""
        return RouterReport(self, name, layer)

    def tell(self, name: str, layer: int, routed: Routed) -> None:
        """Store the report of one router."""
        self._of_layer[layer, name] = routed

    def logits(self) -> tuple[torch.Tensor, ...]:
        """Return the logits of all routers, ordered by layer."""
        return tuple(routed.logits for _, routed in sorted(self._of_layer.items(), key=lambda item: item[0]))

    def loss(self) -> torch.Tensor | None:
        """Return the sum over memories of the mean loss of each memory's layers; None if no router reported."""
        losses: dict[str, list[torch.Tensor]] = {}
        for (_, name), routed in sorted(self._of_layer.items(), key=lambda item: item[0]):
            losses.setdefault(name, []).append(routed.loss)
        means = [
            torch.stack([loss.to(of_memory[0].device) for loss in of_memory]).mean() for of_memory in losses.values()
        ]
        return torch.stack([mean.to(means[0].device) for mean in means]).sum() if means else None


class RouterReport:
    """Writer of one router's report.

    Args:
        reports: All reports of the pass.
        name: Name of the router's memory.
        layer: Index of the router's layer.
    """

    def __init__(self, reports: RouterReports, name: str, layer: int):
        self._reports, self._name, self._layer = reports, name, layer

    def tell(self, logits: torch.Tensor, loss: torch.Tensor) -> None:
        """Store the logits `[S, C]` and the loss, a scalar.

        Raises:
            ValueError: If losses need gradients and the router runs without, as under reentrant activation checkpointing.
        """
        if self._reports.needs_gradient and not torch.is_grad_enabled():
            raise ValueError(
                f"the router of memory {self._name!r} in layer {self._layer} runs without gradients in a pass that trains, as under "
                "reentrant activation checkpointing; expected gradient_checkpointing_kwargs={'use_reentrant': False}."
            )
        self._reports.tell(self._name, self._layer, Routed(logits, loss))

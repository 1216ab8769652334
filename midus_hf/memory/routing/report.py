"""Losses of a router of chapters, and reports of a model's routers, with their losses, on one forward pass."""

import torch


class RouterReports:
    """Reports of all routers on one forward pass; a layer repeated by activation checkpointing replaces its report by an equal one.

    Args:
        needs_gradient: Whether the routers' losses need gradients. Default: false.
    """

    def __init__(self, needs_gradient: bool = False):
        self.needs_gradient = needs_gradient
        # Logits and losses by layer and memory.
        self.routed: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, name: str, layer: int) -> "RouterReport":
        """Return the report to which a memory in a layer writes, by the memory's name and the layer's index."""
        return RouterReport(self, name, layer)

    def logits(self) -> tuple[torch.Tensor, ...]:
        """Return the logits of all routers, ordered by layer."""
        return tuple(self.routed[key][0] for key in sorted(self.routed))

    def loss(self) -> torch.Tensor | None:
        """Return the sum over memories of the mean loss of each memory's layers; None if no router reported."""
        losses: dict[str, list[torch.Tensor]] = {}
        for layer, name in sorted(self.routed):
            losses.setdefault(name, []).append(self.routed[layer, name][1])
        means = [
            torch.stack([loss.to(memory_losses[0].device) for loss in memory_losses]).mean()
            for memory_losses in losses.values()
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
        self._reports.routed[self._layer, self._name] = (logits, loss)


def balance_loss(logits: torch.Tensor, chosen: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return Switch Transformer's load-balance loss over the chapters (Fedus et al. 2021, equation 4).

    The loss is `C * sum_i f_i P_i`: `f_i` is the share of tokens for which chapter i is among the k chosen, a constant; `P_i` is
    chapter i's mean probability. An even choice gives k, since the `f_i` add up to k.

    Every one of the C chapters must be choosable. If `logits` had a chapter that is never chosen, moving all probability to this
    chapter would take the loss to 0, whatever the router chooses.

    Args:
        logits: `[S, C]`, for each stretch of tokens that is routed as one, over the chapters that can be chosen.
        chosen: `[S, k]`, int64, the chapters that each stretch reads.
        counts: `[S]`, number of tokens in each stretch, without padding.

    Returns:
        A scalar, float32 at least.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    shares = (counts / counts.sum().clamp(min=1)).to(wide)  # [S]
    probabilities = (logits.to(wide).softmax(-1) * shares.unsqueeze(-1)).sum(0)  # [C]
    chosen_shares = shares.unsqueeze(-1).expand(chosen.shape)
    frequencies = torch.zeros_like(probabilities).scatter_add(0, chosen.flatten(), chosen_shares.flatten())
    return logits.shape[-1] * (frequencies * probabilities).sum()


def z_loss(logits: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the mean over tokens of the squared log-sum-exp of router logits (ST-MoE, Zoph et al. 2022, equation 5).

    Args:
        logits: `[S, C]`, for each stretch of tokens that is routed as one.
        counts: `[S]`, number of tokens in each stretch, without padding.

    Returns:
        A scalar, float32 at least.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    squares = logits.to(wide).logsumexp(-1).square()
    return (squares * counts).sum() / counts.sum().clamp(min=1)

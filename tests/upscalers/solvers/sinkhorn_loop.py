"""Entropic transport written out: the definition of what the library is asked for."""

import math

import torch


def plan(source: torch.Tensor, target: torch.Tensor, regularization: float, iterations: int = 5000) -> torch.Tensor:
    """The plan [n, m] of least `<T, M> + reg sum T log T` with uniform marginals; M holds distances between rows.

    Sinkhorn's iterations on potentials in float64, never leaving the log domain.
    """
    source, target = source.double(), target.double()
    cost = (source[:, None] - target[None]).square().sum(-1).sqrt()
    n, m = cost.shape
    f, g = cost.new_zeros(n), cost.new_zeros(m)
    for _ in range(iterations):
        g = -regularization * (torch.logsumexp((f[:, None] - cost) / regularization, dim=0) + math.log(m))
        before = f
        f = -regularization * (torch.logsumexp((g[None] - cost) / regularization, dim=1) + math.log(n))
        if (f - before).abs().max() < 1e-14:
            break
    return torch.exp((f[:, None] + g[None] - cost) / regularization)


def barycentric(transport: torch.Tensor) -> torch.Tensor:
    """The plan with columns that sum to one."""
    return transport / transport.sum(0)


def effective_sources(transport: torch.Tensor) -> float:
    """Mean over columns of exp(entropy)."""
    shares = barycentric(transport)
    return torch.exp(-(shares * shares.clamp_min(1e-300).log()).sum(0)).mean().item()

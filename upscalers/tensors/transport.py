"""Transport between the rows of two matrices."""

from dataclasses import dataclass
from typing import Literal

import torch

# Scalings are absorbed into the potentials above this, well within the range of the dtype.
_ABSORB = {torch.float32: 1e30, torch.float64: 1e100}


@dataclass(frozen=True)
class Transport:
    """A plan T [n, m] between n source and m target rows: a matrix, or the source row of each target row."""

    matrix: torch.Tensor | None
    permutation: torch.Tensor | None
    scale: float
    iterations: int
    residual: float
    effective_sources: float

    def rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return `T^T values`: source rows [n, ...] carried to the target's rows [m, ...]."""
        if self.permutation is not None:
            return values[self.permutation] * self.scale
        assert self.matrix is not None
        return (self.matrix.mT @ values) * self.scale

    def columns(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values T`: source columns [..., n] carried to the target's columns [..., m]."""
        if self.permutation is not None:
            return values[..., self.permutation] * self.scale
        assert self.matrix is not None
        return (values @ self.matrix) * self.scale


def sinkhorn(
    source: torch.Tensor,
    target: torch.Tensor,
    regularization: float,
    tolerance: float,
    max_iterations: int,
    plan_scale: Literal["barycentric", "raw"],
) -> Transport:
    """Compute entropic optimal transport between rows [n, c] and [m, c], uniform, with Euclidean costs."""
    import ot

    n, m = len(source), len(target)
    cost = torch.cdist(source, target)  # [n, m]
    source_mass, target_mass = source.new_full((n,), 1 / n), source.new_full((m,), 1 / m)
    row_potential = cost.min(dim=1).values  # [n]
    column_potential = (cost - row_potential[:, None]).min(dim=0).values  # [m]
    plan, log = ot.bregman.sinkhorn_stabilized(
        source_mass,
        target_mass,
        cost,
        regularization,
        numItermax=max_iterations,
        tau=_ABSORB[source.dtype],
        stopThr=tolerance / m**0.5,  # POT measures the error in L2
        warmstart=(row_potential, column_potential),
        log=True,
        warn=False,
    )
    del cost
    column_sums = plan.sum(dim=0)
    residual = (column_sums - target_mass).abs().sum() + (plan.sum(dim=1) - source_mass).abs().sum()
    if plan_scale == "barycentric":
        plan.div_(column_sums)
    return Transport(
        matrix=plan,
        permutation=None,
        scale=1.0,
        iterations=int(log["n_iter"]) + 1,
        residual=residual.item(),
        effective_sources=_effective_sources(plan, column_sums if plan_scale == "raw" else None),
    )


def assignment(source: torch.Tensor, target: torch.Tensor, plan_scale: Literal["barycentric", "raw"]) -> Transport:
    """Compute the row permutation of least total distance; with `"raw"` the plan's entries sum to one."""
    from scipy.optimize import linear_sum_assignment

    assert len(source) == len(target)
    rows, columns = linear_sum_assignment(torch.cdist(source, target).cpu().numpy())
    permutation = torch.empty(len(source), dtype=torch.long)
    permutation[torch.from_numpy(columns)] = torch.from_numpy(rows)
    return Transport(
        matrix=None,
        permutation=permutation.to(source.device),
        scale=1.0 if plan_scale == "barycentric" else 1 / len(source),
        iterations=1,
        residual=0.0,
        effective_sources=1.0,
    )


def _effective_sources(plan: torch.Tensor, column_sums: torch.Tensor | None) -> float:
    total = 0.0
    for first in range(0, plan.shape[1], 1024):
        columns = plan[:, first : first + 1024]
        if column_sums is not None:
            columns = columns / column_sums[first : first + 1024]
        total += torch.special.entr(columns).sum(dim=0).exp().sum().item()
    return total / plan.shape[1]

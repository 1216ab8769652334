"""AdamW that updates only those rows of a table that were read (lazy Adam)."""

from collections.abc import Callable, Iterable
from typing import Any

import torch


class RowAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`, where a gradient may be a sparse tensor of rows, as `torch.optim.SparseAdam` takes it.

    Rows without a gradient stay as they are, their moments and their decay included; in every other row the update is AdamW's, with
    the step of the whole table for its bias correction. The time of a step follows the rows that were read. Moments are as
    large as the table; those of rows that nobody has read yet are never written.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """As `Optimizer.step`."""
        tables = [
            (group, table, table.grad)
            for group in self.param_groups
            for table in group["params"]
            if table.grad is not None and table.grad.is_sparse
        ]
        for _, table, _ in tables:
            table.grad = None
        try:
            loss = super().step(closure)
            for group, table, gradient in tables:
                self._update_rows(group, table, gradient)
        finally:
            for _, table, gradient in tables:
                table.grad = gradient
        return loss

    def _update_rows(self, group: dict[str, Any], table: torch.Tensor, gradient: torch.Tensor) -> None:
        state = self.state[table]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(table), torch.zeros_like(table)
        state["step"] += 1
        step, (beta1, beta2) = state["step"].item(), group["betas"]
        gradient = gradient.coalesce()
        rows, of_rows = gradient.indices()[0], gradient.values().to(table.dtype)
        mean = state["exp_avg"][rows].lerp_(of_rows, 1 - beta1)
        square = state["exp_avg_sq"][rows].mul_(beta2).addcmul_(of_rows, of_rows, value=1 - beta2)
        state["exp_avg"].index_copy_(0, rows, mean)
        state["exp_avg_sq"].index_copy_(0, rows, square)
        root = square.div_(1 - beta2**step).sqrt_().add_(group["eps"])
        updated = table[rows].mul_(1 - group["lr"] * group["weight_decay"])
        table.index_copy_(0, rows, updated.addcdiv_(mean, root, value=-group["lr"] / (1 - beta1**step)))


def norm_of_rows(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """The norm of sparse gradients of tables together, a scalar."""
    return torch.stack([gradient.coalesce().values().norm() for gradient in gradients]).norm()


def clip_rows(
    tables: Iterable[torch.Tensor], max_norm: float, total: Callable[[torch.Tensor], torch.Tensor] = lambda norm: norm
) -> torch.Tensor:
    """Scale the sparse gradients of tables down to a norm that they have together.

    Args:
        tables: With sparse gradients, which are replaced by coalesced ones.
        max_norm: The norm.
        total: The norm over all processes, of the norm in this one. Default: there is one process.

    Returns:
        The norm before that, a scalar.
    """
    tables = list(tables)
    for table in tables:
        assert table.grad is not None
        table.grad = table.grad.coalesce()
    norm = total(norm_of_rows(table.grad for table in tables if table.grad is not None))
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for table in tables:
        assert table.grad is not None
        table.grad.values().mul_(scale)
    return norm

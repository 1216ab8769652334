"""AdamW that updates only the rows of a table that a step read (lazy Adam), and their gradients."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers.training_args import OptimizerNames

from midus_hf.config.errors import RequestError
from midus_hf.memories.hierarchical.training import adamw_update

_MOMENTS = ("exp_avg", "exp_avg_sq")
# Factor by which the storage of moments grows when it is full, so that each row is copied only a few times.
_GROWTH = 1.5


# Optimizers of Transformers whose updates `RowAdamW` computes row by row.
_ROW_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")


def check_sparse_values(trainer: Any) -> None:
    optimizer = OptimizerNames(trainer.args.optim).value
    args = trainer.args
    has_optimizer = trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None
    shares = args.world_size > 1 or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    for is_refused, reason in (
        (not _row_readers(trainer.model), "no memory of this model reads few rows of a large table. Leave it out."),
        (
            optimizer not in _ROW_OPTIMIZERS,
            f"optim is {optimizer!r}; expected {' or '.join(_ROW_OPTIMIZERS)}. Leave one of them out.",
        ),
        (has_optimizer, "the Trainer was given an optimizer, which would be replaced. Leave one of them out."),
        (shares, "several processes train, whose gradients must be dense; expected one process. Leave it out."),
    ):
        if is_refused:
            raise RequestError(f"sparse_values is true, and {reason}")


@contextlib.contextmanager
def row_gradients(model: nn.Module) -> Iterator[None]:
    """Make gradients of large tables sparse tensors of the rows read, within the context."""
    readers = _row_readers(model)
    for reader in readers:
        reader.sparse_gradient = True
    try:
        yield
    finally:
        for reader in readers:
            reader.sparse_gradient = False


def clip_rows(tables: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Coalesce sparse gradients, scale them to a joint norm of `max_norm`; return the norm before."""
    gradients = []
    for table in tables:
        assert table.grad is not None
        table.grad = table.grad.coalesce()
        gradients.append(table.grad.values())
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    for gradient in gradients:
        gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _row_readers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "sparse_gradient")]


class RowAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` for gradients that may be sparse tensors of rows, as `torch.optim.SparseAdam`.

    Rows without a gradient stay unchanged: no update, no decay, the same moments. Other rows get AdamW's update, whose bias
    correction counts the steps of the whole table. A step takes time proportional to the rows read. Moments `[U, v]` exist for the U
    rows that any step has read, in the order of first reading; the state lists these rows as `rows`, `[U]`, int64. An index takes
    four bytes per row of the table. The gradient of a table is sparse in all steps, or dense in all.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        pairs = [(group, table) for group in self.param_groups for table in group["params"] if table.grad is not None]
        tables = [(group, table, table.grad) for group, table in pairs if table.grad.is_sparse]
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

    def state_dict(self) -> dict[str, Any]:
        for state in self.state.values():
            if "rows" not in state:
                continue
            for key in _MOMENTS:
                if state[key].untyped_storage().nbytes() > state[key].nbytes:
                    state[key] = state[key].clone()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as `Optimizer.load_state_dict` does, but keep `rows` in int64."""
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        tables = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, table in zip(saved, tables, strict=True):
            rows = state_dict["state"].get(number, {}).get("rows")
            if rows is not None:
                self.state[table]["rows"] = rows.to(table.device)

    def _update_rows(self, group: dict[str, Any], table: torch.Tensor, gradient: torch.Tensor) -> None:
        """Update the rows that a sparse gradient has, and their moments, which it makes if needed."""
        gradient = gradient.coalesce()
        shape = table.shape[: gradient.sparse_dim()]
        flat = table.view(shape.numel(), *table.shape[gradient.sparse_dim() :])  # [R, ...]
        rows, *others = gradient.indices()
        for index, size in zip(others, shape[1:], strict=True):
            rows = rows * size + index
        state = self.state[table]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["rows"] = rows.new_empty(0)
            state |= {key: flat.new_empty(0, *flat.shape[1:]) for key in _MOMENTS}
        state["step"] += 1
        places = self._places(table, rows, len(flat))
        means, squares = (state[key].view(-1, *flat.shape[1:]) for key in _MOMENTS)
        updated = flat[rows]
        mean = means[places]
        square = squares[places]
        settings = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
        adamw_update(updated, mean, square, gradient.values().to(table.dtype), state["step"].item(), **settings)
        means.index_copy_(0, places, mean)
        squares.index_copy_(0, places, square)
        flat.index_copy_(0, rows, updated)

    def _places(self, table: torch.Tensor, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Return the int64 positions of the moments of rows; new rows get zero moments."""
        known: dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] = self.__dict__.setdefault("_known", {})
        state = self.state[table]
        seen, place_of_row = known.get(table, (None, None))
        if seen is not state["rows"] or place_of_row is None:  # the first step, or the first after a state was loaded
            place_of_row = torch.full((num_rows,), -1, dtype=torch.int32, device=rows.device)
            place_of_row[state["rows"]] = torch.arange(len(state["rows"]), dtype=torch.int32, device=rows.device)
        new = rows[place_of_row[rows] < 0]
        if len(new):
            first = len(state["rows"])
            place_of_row[new] = torch.arange(first, first + len(new), dtype=torch.int32, device=rows.device)
            state["rows"] = torch.cat([state["rows"], new])
            for key in _MOMENTS:
                state[key] = _longer(state[key], len(state["rows"]), num_rows)
        known[table] = (state["rows"], place_of_row)
        return place_of_row[rows].long()


def _longer(moment: torch.Tensor, length: int, most: int) -> torch.Tensor:
    # The unused end of a storage is not written, so that a CPU commits no memory to it.
    used = len(moment)
    row = moment.shape[1:]
    if moment.untyped_storage().nbytes() < length * row.numel() * moment.element_size():
        room = moment.new_empty(min(most, max(length, int(_GROWTH * used))), *row)
        room[:used] = moment
        moment = room
    grown = moment.as_strided((length, *row), moment.stride(), 0)
    grown[used:] = 0
    return grown

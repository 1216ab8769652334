"""Rows of a table whose columns are spread over processes.

Each of P processes holds `v / P` columns of every row. A process gathers the slots of all processes, sums its columns
for the tokens of all of them, and sends every process the sums of that process's tokens (Memory Layers at Scale,
section 3.2; UltraMem, section 3.3). All processes of a group call the same functions in the same order; their numbers
of tokens may differ. The gradient of a table is the sum over the tokens of all processes.
"""

from typing import Any

import torch
import torch.distributed as dist

from midus_hf.ops.gather.parted import parted_gather
from midus_hf.ops.gather.products import gathered_products
from midus_hf.ops.gather.weighted import weighted_gather


def sharded_weighted_gather(
    bank: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, group: "dist.ProcessGroup", **options: Any
) -> torch.Tensor:
    """Compute `weighted_gather` of a table of which this process holds some columns.

    Args:
        bank: This process's columns, `[R, v / P]`.
        slots: Slots of this process's tokens, `[..., m]`, int64.
        weights: Weights of the slots, `[..., m]`, floating point.
        group: The processes that hold the columns, in order of their ranks.
        options: Keyword arguments of `weighted_gather`.

    Returns:
        `[..., v]`, the dtype of `bank`.
    """
    leading, m = slots.shape[:-1], slots.shape[-1]
    flat_slots, flat_weights = slots.reshape(-1, m), weights.reshape(-1, m)
    padding = _padding(len(flat_slots), flat_slots.device, group)
    all_slots = _AllGather.apply(_padded_slots(flat_slots, padding), group)
    all_weights = _AllGather.apply(_padded(flat_weights, padding), group)
    columns = weighted_gather(bank, all_slots, all_weights, **options)  # [P * S, v / P]
    by_process = _AllToAll.apply(columns, group).unflatten(0, (group.size(), -1))  # [P, S, v / P], of own tokens
    rows = by_process.transpose(0, 1).flatten(1)[: len(flat_slots)]
    return rows.reshape(*leading, rows.shape[-1])


def sharded_parted_gather(
    bank: torch.Tensor,
    slots: torch.Tensor,
    weights: torch.Tensor,
    parts: torch.Tensor,
    num_parts: int,
    group: "dist.ProcessGroup",
    **options: Any,
) -> torch.Tensor:
    """Compute `parted_gather` of a table of which this process holds some columns.

    Args:
        bank: This process's columns, `[R, v / P]`.
        slots: Slots of this process's tokens, `[..., m]`, int64.
        weights: Weights of the slots, `[..., m]`, floating point.
        parts: Part of each slot, `[..., m]`, int64.
        num_parts: Sums per token.
        group: The processes that hold the columns, in order of their ranks.
        options: Keyword arguments of `parted_gather`.

    Returns:
        `[..., num_parts, v]`, the dtype of `bank`.
    """
    leading, m = slots.shape[:-1], slots.shape[-1]
    flat_slots, flat_weights, flat_parts = (of_slots.reshape(-1, m) for of_slots in (slots, weights, parts))
    padding = _padding(len(flat_slots), flat_slots.device, group)
    all_slots, all_parts = (_AllGather.apply(_padded_slots(of, padding), group) for of in (flat_slots, flat_parts))
    all_weights = _AllGather.apply(_padded(flat_weights, padding), group)
    columns = parted_gather(bank, all_slots, all_weights, all_parts, num_parts, **options)  # [P * S, num_parts, v / P]
    by_process = _AllToAll.apply(columns, group).unflatten(0, (group.size(), -1))  # of own tokens
    sums = by_process.movedim(0, 2).flatten(2)[: len(flat_slots)]
    return sums.reshape(*leading, *sums.shape[1:])


def sharded_gathered_products(
    vectors: torch.Tensor, bank: torch.Tensor, slots: torch.Tensor, group: "dist.ProcessGroup", **options: Any
) -> torch.Tensor:
    """Compute `gathered_products` with a table of which this process holds some columns.

    Args:
        vectors: Vectors of this process's tokens, `[..., v]`, floating point, cast to the dtype of `bank`.
        bank: This process's columns, `[R, v / P]`.
        slots: Slots of this process's tokens, `[..., m]`, int64.
        group: The processes that hold the columns, in order of their ranks.
        options: Keyword arguments of `gathered_products`.

    Returns:
        `[..., m]`, float32, or float64 for a float64 bank.

    Raises:
        ValueError: If the columns of all processes are not as wide as the vectors.
    """
    size, m = group.size(), slots.shape[-1]
    if vectors.shape[-1] != bank.shape[-1] * size:
        raise ValueError(
            f"vectors is {tuple(vectors.shape)} and bank {tuple(bank.shape)} in each of {size} processes; expected vectors as wide "
            "as the columns of all."
        )
    flat_vectors, flat_slots = vectors.to(bank.dtype).flatten(0, -2), slots.reshape(-1, m)
    padding = _padding(len(flat_slots), flat_slots.device, group)
    by_process = _padded(flat_vectors, padding).unflatten(-1, (size, -1)).transpose(0, 1)  # [P, S, v / P]
    columns = _AllToAll.apply(by_process.flatten(0, 1), group)  # [P * S, v / P], of all tokens
    all_slots = _AllGather.apply(_padded_slots(flat_slots, padding), group)
    products = gathered_products(columns, bank, all_slots, **options)
    return _ReduceScatter.apply(products, group)[: len(flat_slots)].reshape(slots.shape)


def _padding(count: int, device: torch.device, group: "dist.ProcessGroup") -> int:
    """Return how many tokens this process lacks compared with the process that has most."""
    most = torch.tensor([count], device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    return int(most) - count


def _padded(rows: torch.Tensor, padding: int) -> torch.Tensor:
    return torch.nn.functional.pad(rows, (0, 0, 0, padding)) if padding else rows


def _padded_slots(slots: torch.Tensor, padding: int) -> torch.Tensor:
    """Return the slots, padded by repeating the slots of the last token, so that no other row counts as read."""
    return torch.cat([slots, slots[-1:].expand(padding, -1)]) if padding else slots


class _AllGather(torch.autograd.Function):
    """Gathering of `[S, ...]` of each process into `[P * S, ...]` in all processes; gradients are summed."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: "dist.ProcessGroup") -> torch.Tensor:  # type: ignore[override]
        ctx.group = group
        whole = part.new_empty(len(part) * group.size(), *part.shape[1:])
        dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:  # type: ignore[override]
        return _ReduceScatter.apply(gradient, ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    """Sum of `[P * S, ...]` over processes, of which each process gets its `[S, ...]`."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: "dist.ProcessGroup") -> torch.Tensor:  # type: ignore[override]
        ctx.group = group
        part = whole.new_empty(len(whole) // group.size(), *whole.shape[1:])
        dist.reduce_scatter_tensor(part, whole.contiguous(), group=group)
        return part

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:  # type: ignore[override]
        return _AllGather.apply(gradient, ctx.group), None


class _AllToAll(torch.autograd.Function):
    """Exchange of `[P * S, ...]`: the p-th `[S, ...]` goes to process p, which orders what it receives by the sender's rank."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: "dist.ProcessGroup") -> torch.Tensor:  # type: ignore[override]
        ctx.group = group
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:  # type: ignore[override]
        return _AllToAll.apply(gradient, ctx.group), None

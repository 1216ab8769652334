"""The three sums of gathering: weighted rows per token, weighted gradients per row, and products per weight.

Slots and weights are flat here: `[S, m]` slots into a table `[R, v]`. All sums are in float32 at least.
"""

from typing import Any

import torch
import torch.nn.functional as F

from midus_hf.ops.dispatch.native.library import native_library
from midus_hf.ops.dispatch.precision import narrowest_integer
from midus_hf.ops.gather.native import native_gathered_products, native_row_sums, native_weighted_rows
from midus_hf.ops.gather.triton import triton_row_sums, triton_weight_gradients, triton_weighted_rows

# Largest width of rows that C sums. PyTorch sums wider rows as fast or faster: it sorts entries by row, and writes
# each row once.
_MOST_COLUMNS_IN_C = 64

# Elements of gathered rows that PyTorch keeps at a time: 64 MB in float32.
_MOST_GATHERED = 1 << 24


def weighted_rows(bank: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, backend: str) -> torch.Tensor:
    """Return `sum_m weights[s, m] * bank[slots[s, m]]`: `[S, v]`, the dtype of `bank`."""
    if backend == "triton":
        return triton_weighted_rows(bank, slots, weights)
    if backend == "native" and native_library() is not None:
        return native_weighted_rows(bank, slots, weights)
    wide_rows, places = widened(bank, slots)
    return F.embedding_bag(places, wide_rows, per_sample_weights=weights.to(wide_rows.dtype), mode="sum").to(
        bank.dtype
    )


def row_sums(
    gradient: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, num_rows: int, backend: str
) -> torch.Tensor:
    """Return `sum over (s, m) with slots[s, m] == r of weights[s, m] * gradient[s]`: `[num_rows, v]`, float32 at least.

    Args:
        gradient: Gradient of the sum of each token, `[S, v]`.
        slots: Rows that each token reads, `[S, m]`.
        weights: Weights of these rows, `[S, m]`.
        num_rows: Rows of the table, R.
        backend: `"torch"`, `"native"` or `"triton"`. PyTorch replaces `"native"` if a graph was traced for C but C
            cannot be built here.
    """
    if backend == "triton":
        return triton_row_sums(gradient, slots, weights, num_rows)
    in_c = backend == "native" and native_library() is not None
    if in_c and gradient.shape[1] <= _MOST_COLUMNS_IN_C:
        return native_row_sums(gradient, slots, weights, num_rows)
    wide = torch.promote_types(gradient.dtype, torch.float32)
    sorted_slots, order = slots.flatten().to(narrowest_integer(num_rows)).sort(stable=True)
    starts = torch.searchsorted(sorted_slots, torch.arange(num_rows, device=slots.device, dtype=sorted_slots.dtype))
    return F.embedding_bag(  # one bag per row: the tokens that read the row, in their order
        order // slots.shape[1],
        gradient.to(wide),
        starts,
        per_sample_weights=weights.to(wide).flatten()[order],
        mode="sum",
    )


def weight_gradients(gradient: torch.Tensor, bank: torch.Tensor, slots: torch.Tensor, backend: str) -> torch.Tensor:
    """Return `<gradient[s], bank[slots[s, m]]>`: `[S, m]`, float32 at least."""
    if backend == "triton":
        return triton_weight_gradients(gradient, bank, slots)
    if backend == "native" and native_library() is not None:
        return native_gathered_products(gradient, bank, slots)
    wide_rows, places = widened(bank, slots)
    bags = torch.arange(len(slots), device=slots.device).repeat_interleave(slots.shape[1])
    wide = gradient.to(wide_rows.dtype).contiguous()
    return products_with_bags(wide, wide_rows, places.flatten(), bags).view(slots.shape)


def widened(bank: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows in float32 at least, and the index among them of each slot's row, `[S, m]`.

    If few rows of a half-precision bank are read, as in decoding, only these rows are copied: copying the whole bank
    would take a hundred times as long. Sums over the copy add in the same order, and so give the same bits.
    """
    wide = torch.promote_types(bank.dtype, torch.float32)
    if bank.dtype == wide or slots.numel() >= len(bank):
        return bank.to(wide), slots
    places = torch.arange(slots.numel(), device=slots.device).view(slots.shape)
    # The gradient of an embedding is summed in a fixed order.
    return F.embedding(slots.flatten(), bank).to(wide), places


def products_with_bags(
    gradient: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, bags: torch.Tensor
) -> torch.Tensor:
    """Return `<gradient[bags[i]], rows[places[i]]>` for each i, `[N]`, some rows at a time."""
    stretch = max(1, _MOST_GATHERED // max(1, rows.shape[1]))
    pairs = zip(places.split(stretch), bags.split(stretch), strict=True)
    return torch.cat([(rows[row_numbers] * gradient[bag]).sum(-1) for row_numbers, bag in pairs])


def rows_read(bank: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of a bank that slots read, and the index of each slot's row among them.

    The gradient of the bank is a coalesced sparse tensor of these rows. Counting the rows waits for the device.

    Args:
        bank: Table to read, `[R, v]`.
        slots: Integers of any shape.
    """
    numbers, places = torch.unique(slots, return_inverse=True)
    return _RowsRead.apply(bank, numbers), places


class _RowsRead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bank: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(numbers)
        ctx.shape = bank.shape
        return bank.index_select(0, numbers)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        (numbers,) = ctx.saved_tensors
        return torch.sparse_coo_tensor(
            numbers[None], gradient, ctx.shape, is_coalesced=True, check_invariants=False
        ), None

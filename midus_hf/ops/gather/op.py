"""Weighted sums of table rows, products of vectors with rows, and their three sums and gradients.

The sums take flat arguments, `[S, m]` slots into a table `[R, v]`, and add in float32 at least. If a graph was traced for C that
cannot be built, PyTorch computes them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from midus_hf.ops.dispatch.calling import differentiable_op, narrowest_integer, resolve, wide_dtype
from midus_hf.ops.dispatch.library import native_library
from midus_hf.ops.dispatch.private_torch import can_skip_dispatcher
from midus_hf.ops.gather.native import native_gathered_products, native_row_sums, native_weighted_rows
from midus_hf.ops.gather.triton import triton_row_sums, triton_weight_gradients, triton_weighted_rows

# Largest width of rows that C sums: PyTorch, which sorts entries by row, sums wider rows as fast or faster.
_MAX_NATIVE_COLUMNS = 64

_MAX_GATHERED = 1 << 24  # elements of gathered rows that PyTorch keeps at a time: 64 MB in float32


def reference_weighted_gather(bank: Tensor, slots: Tensor, weights: Tensor, sparse_gradient: bool = False) -> Tensor:
    """Sum rows of a table, `out = sum_m weights[..., m] * bank[slots[..., m]]` (MIDUS, equation 14).

    Shapes: bank `[R, v]`, slots and weights `[..., m]`; the result `[..., v]` has the dtype of the bank.
    """
    rows = _rows(bank, slots, sparse_gradient)  # [..., m, v]
    return (weights.to(rows.dtype).unsqueeze(-1) * rows).sum(-2).to(bank.dtype)


def reference_gathered_products(vectors: Tensor, bank: Tensor, slots: Tensor, sparse_gradient: bool = False) -> Tensor:
    """Multiply vectors with rows: `out[..., m] = <vectors, bank[slots[..., m]]>` (UltraMemV2, eq. 15).

    Shapes: vectors `[..., v]`, bank `[R, v]`, slots `[..., m]`; the result `[..., m]` is float32 at least.
    """
    rows = _rows(bank, slots, sparse_gradient)  # [..., m, v]
    vectors = vectors.to(bank.dtype).to(rows.dtype)
    return (rows * vectors.unsqueeze(-2)).sum(-1)  # a matrix product would be narrowed under autocast


def _rows(bank: Tensor, slots: Tensor, sparse_gradient: bool) -> Tensor:
    """Return rows in float32 at least, so that thousands of gradients of a row are summed in float32."""
    wide = torch.promote_types(bank.dtype, torch.float32)
    if torch.is_grad_enabled() and bank.requires_grad:
        return F.embedding(slots, bank.to(wide), sparse=sparse_gradient)
    return F.embedding(slots, bank).to(wide)


def weighted_gather(
    bank: Tensor, slots: Tensor, weights: Tensor, *, sparse_gradient: bool = False, backend: str = "auto"
) -> Tensor:
    """Sum rows of a table, `out = sum_m weights[..., m] * bank[slots[..., m]]` (MIDUS, equation 14).

    Sums, also of gradients, are accumulated in float32 at least, since thousands of tokens may read one row.

    Args:
        bank: `[R, v]`, floating point.
        slots: `[..., m]`, int64, `0 <= slot < R`.
        weights: `[..., m]`, floating point.
        sparse_gradient: Whether the gradient of `bank` is a coalesced sparse tensor of the rows that were read: for tables with few
            rows read per batch. Counting the rows waits for the device. Default: false.
        backend: Body to run, as in `OpChoices`. Default: `"auto"`.

    Returns:
        `[..., v]`, the dtype of `bank`.

    Raises:
        ValueError: If the shapes disagree.
        IndexError: On a CPU, if a slot is not a row of the bank.
    """
    if bank.dim() != 2:
        raise ValueError(f"bank is {tuple(bank.shape)}; expected [rows, width].")
    if slots.shape != weights.shape:
        raise ValueError(f"slots is {tuple(slots.shape)} and weights {tuple(weights.shape)}; expected equal shapes.")
    body = resolve(backend, bank, native_refusal=None)
    if body == "reference":
        return reference_weighted_gather(bank, slots, weights, sparse_gradient)
    if sparse_gradient and torch.is_grad_enabled():
        bank, slots = rows_read(bank, slots)
    leading, m = slots.shape[:-1], slots.shape[-1]
    tensors = (bank, slots.reshape(-1, m), weights.reshape(-1, m))
    sums = weighted_rows if can_skip_dispatcher(*tensors) else weighted_gather_op
    return sums(*tensors, body).reshape(*leading, bank.shape[-1])


def gathered_products(
    vectors: Tensor, bank: Tensor, slots: Tensor, *, sparse_gradient: bool = False, backend: str = "auto"
) -> Tensor:
    """Multiply vectors with rows: `out[..., m] = <vectors, bank[slots[..., m]]>` (UltraMemV2, eq. 15).

    Fused bodies do not store the gathered rows of all vectors. Sums are accumulated in float32 at least.

    Args:
        vectors: `[..., v]`, floating point, cast to the dtype of `bank`.
        bank: `[R, v]`, floating point.
        slots: `[..., m]`, int64, `0 <= slot < R`.
        sparse_gradient: As in `weighted_gather`. Default: false.
        backend: Body to run, as in `OpChoices`. Default: `"auto"`.

    Returns:
        `[..., m]`, float32, or float64 for a float64 bank.

    Raises:
        ValueError: If the shapes disagree.
    """
    if bank.dim() != 2 or vectors.shape[-1] != bank.shape[-1]:
        raise ValueError(
            f"vectors is {tuple(vectors.shape)} and bank {tuple(bank.shape)}; expected [..., width] and [rows, width]."
        )
    if slots.shape[:-1] != vectors.shape[:-1]:
        raise ValueError(
            f"slots is {tuple(slots.shape)}; expected slots for each of the vectors {tuple(vectors.shape[:-1])}."
        )
    body = resolve(backend, bank, native_refusal=None)
    vectors = vectors.to(bank.dtype)
    if body == "reference":
        return reference_gathered_products(vectors, bank, slots, sparse_gradient)
    shape = slots.shape
    if sparse_gradient and torch.is_grad_enabled():
        bank, slots = rows_read(bank, slots)
    tensors = (vectors.reshape(-1, vectors.shape[-1]), bank, slots.reshape(-1, shape[-1]))
    products = row_products if can_skip_dispatcher(*tensors) else gathered_products_op
    return products(*tensors, body).reshape(shape)


def weighted_rows(bank: Tensor, slots: Tensor, weights: Tensor, backend: str) -> Tensor:
    """Return `sum_m weights[s, m] * bank[slots[s, m]]`, `[S, v]`, as `bank`; `backend` is a resolved name."""
    if backend == "triton":
        return triton_weighted_rows(bank, slots, weights)
    if backend == "native" and native_library() is not None:
        return native_weighted_rows(bank, slots, weights)
    rows, places = _widened(bank, slots)
    return F.embedding_bag(places, rows, per_sample_weights=weights.to(rows.dtype), mode="sum").to(bank.dtype)


def row_products(vectors: Tensor, bank: Tensor, slots: Tensor, backend: str) -> Tensor:
    """Return `<vectors[s], bank[slots[s, m]]>`: `[S, m]`, float32 at least."""
    if backend == "triton":
        return triton_weight_gradients(vectors, bank, slots)
    if backend == "native" and native_library() is not None:
        return native_gathered_products(vectors, bank, slots)
    rows, places = _widened(bank, slots)
    bags = torch.arange(len(slots), device=slots.device).repeat_interleave(slots.shape[1])
    wide = vectors.to(rows.dtype).contiguous()
    stretch = max(1, _MAX_GATHERED // max(1, rows.shape[1]))
    pairs = zip(places.flatten().split(stretch), bags.split(stretch), strict=True)
    return torch.cat([(rows[numbers] * wide[bag]).sum(-1) for numbers, bag in pairs]).view(slots.shape)


def row_sums(gradient: Tensor, slots: Tensor, weights: Tensor, num_rows: int, backend: str) -> Tensor:
    """Return `weights[s, m] * gradient[s]` summed by row `slots[s, m]`: `[num_rows, v]`, float32 at least."""
    if backend == "triton":
        return triton_row_sums(gradient, slots, weights, num_rows)
    if backend == "native" and native_library() is not None and gradient.shape[1] <= _MAX_NATIVE_COLUMNS:
        return native_row_sums(gradient, slots, weights, num_rows)
    wide = wide_dtype(gradient)
    sorted_slots, order = slots.flatten().to(narrowest_integer(num_rows)).sort(stable=True)
    starts = torch.searchsorted(sorted_slots, torch.arange(num_rows, device=slots.device, dtype=sorted_slots.dtype))
    # One bag per row: the tokens that read the row, in their order.
    return F.embedding_bag(
        order // slots.shape[1],
        gradient.to(wide),
        starts,
        per_sample_weights=weights.to(wide).flatten()[order],
        mode="sum",
    )


def _widened(bank: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows in float32 at least (if few are read, only these), and each slot's index among them."""
    wide = wide_dtype(bank)
    if bank.dtype == wide or slots.numel() >= len(bank):
        return bank.to(wide), slots
    places = torch.arange(slots.numel(), device=slots.device).view(slots.shape)
    return F.embedding(slots.flatten(), bank).to(wide), places


def _gather_gradients(
    gradient: Tensor, bank: Tensor, slots: Tensor, weights: Tensor, wants: list[bool], backend: str
) -> tuple[Tensor | None, Tensor | None]:
    into_bank = row_sums(gradient, slots, weights, len(bank), backend).to(bank.dtype) if wants[0] else None
    return into_bank, row_products(gradient, bank, slots, backend).to(weights.dtype) if wants[1] else None


weighted_gather_op = differentiable_op(
    "weighted_gather",
    weighted_rows,
    _gather_gradients,
    lambda bank, slots, weights, backend: bank.new_empty(slots.shape[0], bank.shape[1]),
    gradients=("bank", "weights"),
)


def _product_gradients(
    gradient: Tensor, vectors: Tensor, bank: Tensor, slots: Tensor, wants: list[bool], backend: str
) -> tuple[Tensor | None, Tensor | None]:
    into_vectors = weighted_rows(bank, slots, gradient, backend).to(vectors.dtype) if wants[0] else None
    return into_vectors, row_sums(vectors, slots, gradient, len(bank), backend).to(bank.dtype) if wants[1] else None


gathered_products_op = differentiable_op(
    "gathered_products",
    row_products,
    _product_gradients,
    lambda vectors, bank, slots, backend: vectors.new_empty(slots.shape, dtype=wide_dtype(bank)),
    gradients=("vectors", "bank"),
)


def rows_read(bank: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows that slots read, and each slot's index among them; the gradient is sparse.

    Counting the rows waits for the device.
    """
    numbers, places = torch.unique(slots, return_inverse=True)
    return _RowsRead.apply(bank, numbers), places


class _RowsRead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bank: Tensor, numbers: Tensor) -> Tensor:
        ctx.save_for_backward(numbers)
        ctx.shape = bank.shape
        return bank.index_select(0, numbers)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (numbers,) = ctx.saved_tensors
        shape = ctx.shape
        return torch.sparse_coo_tensor(numbers[None], gradient, shape, is_coalesced=True, check_invariants=False), None

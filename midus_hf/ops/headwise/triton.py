"""The kernel of the fused head-wise lookup, which selects, weighs and gathers in one launch.

Sizes: S tokens, H heads; `BT` tokens per program, `BN` sub-keys per stretch; `KP`, `DP` and `VP` the powers of two at
or above k, d / 2 and v.
"""

import functools
from typing import NamedTuple

import torch

from midus_hf.ops.dispatch.triton import Tile, on_device_of, power_of_two, quotient_above, tl, triton
from midus_hf.ops.headwise.inputs import LookupInputs, room_for_gradient
from midus_hf.ops.product_key.triton.forward import (
    FEW_TOKENS,
    HEADS_TOGETHER,
    best_slots_of_keys,
    selection_tile,
    token_block_and_head,
    wide_products,
)


@triton.jit
def weighted_row(bank, slots, shares, rank, valid, width, KP: tl.constexpr, VP: tl.constexpr):
    """Return the row [BT, VP] of each token's slot of this rank, times the slot's share."""
    ranks, lanes = tl.arange(0, KP), tl.arange(0, VP)
    here = ranks[None, :] == rank
    slot = tl.sum(tl.where(here, slots, 0), axis=1).to(tl.int64)
    mask = valid[:, None] & (lanes < width)[None, :]
    row = tl.load(bank + slot[:, None] * width + lanes[None, :], mask=mask, other=0.0).to(tl.float32)
    return row * tl.sum(tl.where(here, shares, 0.0), axis=1)[:, None]


@triton.jit
def forward_kernel(
    query, row_keys, column_keys, bank, residual, output, slots, weights,
    tokens, heads, n, half, width, token_stride, head_stride, bank_stride, inverse_temperature,
    ADDS: tl.constexpr, KEEPS: tl.constexpr, WIDE: tl.constexpr, TOGETHER: tl.constexpr, ONE: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """Write the output [S, H, v] and, if KEEPS, slots and weights [S, H, K]; the query [S, H, 2 * half] has contiguous rows."""
    block, head = token_block_and_head(tokens, heads, BT, TOGETHER)
    token = block * BT + tl.arange(0, BT)
    valid = token < tokens
    scores, chosen = best_slots_of_keys(
        query, row_keys, column_keys, token, head, valid, n, half, token_stride, head_stride, WIDE, ONE, K, KP, BT, BN, DP,
    )  # fmt: skip
    ranks, lanes = tl.arange(0, KP), tl.arange(0, VP)
    shares = tl.exp((scores - tl.max(scores, axis=1)[:, None]) * inverse_temperature)
    shares = tl.where(ranks[None, :] < K, shares, 0.0)  # padding has no share, at any temperature
    shares = shares / tl.sum(shares, axis=1)[:, None]
    if KEEPS:
        entries = ((token * heads + head) * K)[:, None] + ranks[None, :]
        rank_mask = valid[:, None] & (ranks < K)[None, :]
        tl.store(slots + entries, chosen.to(slots.dtype.element_ty), mask=rank_mask)
        tl.store(weights + entries, shares, mask=rank_mask)

    # All slots are known before the first row is loaded, so that the loads of all rows overlap.
    gathered = tl.zeros([BT, VP], tl.float32)
    bank_of_head = bank + head * bank_stride
    if K <= 8:
        for rank in tl.static_range(K):
            gathered += weighted_row(bank_of_head, chosen, shares, rank, valid, width, KP, VP)
    else:
        for rank in range(K):
            gathered += weighted_row(bank_of_head, chosen, shares, rank, valid, width, KP, VP)
    there = (token * heads + head)[:, None] * width + lanes[None, :]
    lane_mask = valid[:, None] & (lanes < width)[None, :]
    result = gathered
    if ADDS:
        result += tl.load(residual + there, mask=lane_mask, other=0.0).to(tl.float32)
    tl.store(output + there, result.to(output.dtype.element_ty), mask=lane_mask)


def triton_lookup(inputs: LookupInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output `[S, H, v]`, and for the gradient slots `[S, H, k]` and weights `[S, H, k]`, float32."""
    kept = room_for_gradient(inputs)
    return triton_output(inputs, kept), *kept


def triton_output(inputs: LookupInputs, kept: tuple[torch.Tensor, torch.Tensor] | None = None) -> torch.Tensor:
    """Return the output `[S, H, v]`, and write slots and weights for a gradient into `kept` unless that is None."""
    query, row_keys, _, bank, residual, k, temperature = inputs
    there = lookup_tensors(inputs, kept)
    (tokens, heads, _), (_, n, half), width = query.shape, row_keys.shape, bank.shape[-1]
    if tokens:
        is_wide = wide_products(query, row_keys)
        lanes = power_of_two(width)
        tile = _tile(n, k, half, lanes, tokens <= FEW_TOKENS, is_wide)
        with on_device_of(query):
            forward_kernel[(quotient_above(tokens, tile["BT"]) * heads,)](
                *there, tokens, heads, n, half, width, there.query.stride(0), there.query.stride(1), _bank_stride(there.bank),
                1.0 / temperature,
                ADDS=residual is not None, KEEPS=kept is not None, WIDE=is_wide, TOGETHER=HEADS_TOGETHER, K=k, **tile,
            )  # fmt: skip
    return there.output


@functools.cache
def _tile(n: int, k: int, half: int, lanes: int, few: bool, is_wide: bool) -> Tile:
    return selection_tile(n, k, half, few, is_wide, lanes) | {"VP": lanes}


def _bank_stride(bank: torch.Tensor) -> int:
    """Return the number of elements from one head's bank to the next; 0 if heads share a bank."""
    return bank.stride(0) if bank.dim() == 3 else 0


class LookupTensors(NamedTuple):
    """Inputs in the memory layout that kernels read, and results to fill. All but the query are contiguous.

    Args:
        query: `[S, H, 2 * half]`, with a contiguous last dimension.
        row_keys: `[H, n, half]`.
        column_keys: `[H, n, half]`.
        bank: `[N, v]`, or `[H, N, v]`.
        residual: `[S, H, v]`; without a residual a stand-in, the output, which kernels do not read.
        output: `[S, H, v]`, in the dtype of the residual, or of the bank without a residual.
        slots: `[S, H, k]`; a stand-in, the output, if nothing is kept for a gradient.
        weights: `[S, H, k]`; the same stand-in if nothing is kept for a gradient.
    """

    query: torch.Tensor
    row_keys: torch.Tensor
    column_keys: torch.Tensor
    bank: torch.Tensor
    residual: torch.Tensor
    output: torch.Tensor
    slots: torch.Tensor
    weights: torch.Tensor


def lookup_tensors(inputs: LookupInputs, kept: tuple[torch.Tensor, torch.Tensor] | None) -> LookupTensors:
    """Lay out the inputs of a lookup and allocate its output; `kept` has slots and weights to fill for a gradient."""
    query, row_keys, column_keys, bank, residual, _, _ = inputs
    tokens, heads, _ = query.shape
    output = (bank if residual is None else residual).new_empty(tokens, heads, bank.shape[-1])
    return LookupTensors(
        query if query.stride(-1) == 1 else query.contiguous(),
        row_keys.contiguous(),
        column_keys.contiguous(),
        bank.contiguous(),
        output if residual is None else residual.contiguous(),
        output,
        *((output, output) if kept is None else kept),
    )

"""The kernel of the fused head-wise lookup, which selects, weights and gathers in one launch.

Sizes: S tokens, H heads; `BT` tokens per program, `BN` sub-keys per stretch; `KP`, `DP`, `VP` the powers of two from k, d / 2, v on.
"""

from torch import Tensor

from midus_hf.ops.dispatch.triton import on_device_of, power_of_two, quotient_above, tl, triton
from midus_hf.ops.product_key.native import LookupInputs, room_for_gradient
from midus_hf.ops.product_key.triton import (
    FEW_TOKENS,
    HEADS_TOGETHER,
    best_slots_of_keys,
    cached_tile,
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
    tokens, heads, n, half, width, token_stride, head_stride, bank_stride,
    ADDS: tl.constexpr, KEEPS: tl.constexpr, WIDE: tl.constexpr, TOGETHER: tl.constexpr, ONE: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """Write the output [S, H, v] and, if KEEPS, slots and weights [S, H, K]; query rows are contiguous."""
    block, head = token_block_and_head(tokens, heads, BT, TOGETHER)
    token = block * BT + tl.arange(0, BT)
    valid = token < tokens
    scores, chosen = best_slots_of_keys(
        query, row_keys, column_keys, token, head, valid, n, half, token_stride, head_stride, WIDE, ONE, K, KP, BT, BN, DP,
    )  # fmt: skip
    ranks, lanes = tl.arange(0, KP), tl.arange(0, VP)
    shares = tl.exp(scores - tl.max(scores, axis=1)[:, None])
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


def triton_lookup(inputs: LookupInputs, keeps: bool) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Return the output `[S, H, v]` without transforms and, if `keeps`, slots and weights `[S, H, k]`."""
    query, row_keys, column_keys, bank, _, residual, k = inputs
    query = query if query.stride(-1) == 1 else query.contiguous()
    row_keys, column_keys, bank = row_keys.contiguous(), column_keys.contiguous(), bank.contiguous()
    (tokens, heads, _), (_, n, half), width = query.shape, row_keys.shape, bank.shape[-1]
    output = (bank if residual is None else residual).new_empty(tokens, heads, width)
    kept = room_for_gradient(inputs) if keeps else None
    added = output if residual is None else residual.contiguous()  # kernels do not read placeholders
    if tokens:
        is_wide = wide_products(query, row_keys)
        lanes = power_of_two(width)
        tile = cached_tile(n, k, half, tokens <= FEW_TOKENS, is_wide, lanes)
        bank_stride = bank.stride(0) if bank.dim() == 3 else 0  # heads may share a bank
        with on_device_of(query):
            forward_kernel[(quotient_above(tokens, tile["BT"]) * heads,)](
                query, row_keys, column_keys, bank, added, output, *(kept or (output, output)),
                tokens, heads, n, half, width, query.stride(0), query.stride(1), bank_stride,
                ADDS=residual is not None, KEEPS=keeps, WIDE=is_wide, TOGETHER=HEADS_TOGETHER, K=k, VP=lanes, **tile,
            )  # fmt: skip
    return output, kept

"""The kernel of the fused head-wise lookup: select, weigh and gather in one.

Shapes: S tokens, H heads; `BT` tokens per program, `BN` sub-keys per stretch, `KP`, `DP` and `VP` the powers of two at or
above k, d / 2 and v.
"""

import torch

from midus_hf.ops.backend import interprets_kernels
from midus_hf.ops.lookup_tensors import lookup_tensors
from midus_hf.ops.product_key_triton import best_columns, first_sums, merge_best, next_pair, pick, select_tile
from midus_hf.ops.tiles import Changes, Tile, tiles
from midus_hf.ops.triton_import import tl, triton
from midus_hf.ops.triton_launch import on_device_of, power_of_two, quotient_above

HEADS_TOGETHER = 8
"""Heads whose programs run side by side: what they read of a token lies side by side, what they gather stays in cache."""

FEW_TOKENS = 16
"""The fewest rows of a matrix product: no more are computed for the tokens of a decoding step."""


@triton.jit
def token_block_and_head(tokens, heads, BT, TOGETHER: tl.constexpr):
    """Which block of BT tokens and which head this program works on: group after group of heads."""
    program = tl.program_id(0)
    blocks = tl.cdiv(tokens, BT)
    group = program // (TOGETHER * blocks)
    members = tl.minimum(heads - group * TOGETHER, TOGETHER)
    within = program % (TOGETHER * blocks)
    return (within // members).to(tl.int64), (group * TOGETHER + within % members).to(tl.int64)


@triton.jit
def best_of_key_stretch(
    query, keys, n, half, start, WIDE: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr,
    BN: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """The K sub-keys of highest score for each query [BT, DP], out of keys `start` to `start + BN` of [n, half]."""
    dims = tl.arange(0, DP)
    columns = start + tl.arange(0, BN)
    mask = (dims < half)[:, None] & (columns < n)[None, :]
    part = tl.load(keys + columns[None, :] * half + dims[:, None], mask=mask, other=0.0)  # [DP, BN]
    if WIDE:
        scores = tl.dot(query.to(tl.float32), part.to(tl.float32), input_precision="ieee")
    else:
        scores = tl.dot(query, part)
    scores = tl.where((columns < n)[None, :], scores, float("-inf"))
    return best_columns(scores, start, n, K, KP, BT, BN)


@triton.jit
def best_of_keys(
    query, keys, n, half, WIDE: tl.constexpr, ONE: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr,
    BN: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """The K sub-keys of highest score for each query [BT, DP], out of keys [n, half], a stretch of BN at a time."""
    values, chosen = best_of_key_stretch(query, keys, n, half, 0, WIDE, K, KP, BT, BN, DP)
    if not ONE:
        for start in range(BN, n, BN):
            more_values, more_chosen = best_of_key_stretch(query, keys, n, half, start, WIDE, K, KP, BT, BN, DP)
            values, chosen = merge_best(values, chosen, more_values, more_chosen, K, KP, BT)
    return values, chosen


@triton.jit
def best_slots_of_keys(
    query, row_keys, column_keys, token, head, valid, n, half, token_stride, head_stride,
    WIDE: tl.constexpr, ONE: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
    DP: tl.constexpr,
):  # fmt: skip
    """Scores of the K best slots of tokens [BT] for one head, descending, then minus infinity; and the slots: [BT, KP] each."""
    dims, ranks = tl.arange(0, DP), tl.arange(0, KP)
    asked = query + token[:, None] * token_stride + head * head_stride + dims[None, :]
    mask = valid[:, None] & (dims < half)[None, :]
    keys_of_head = head * n * half
    row_query = tl.load(asked, mask=mask, other=0.0)
    row_values, rows = best_of_keys(row_query, row_keys + keys_of_head, n, half, WIDE, ONE, K, KP, BT, BN, DP)
    column_query = tl.load(asked + half, mask=mask, other=0.0)
    column_values, columns = best_of_keys(
        column_query, column_keys + keys_of_head, n, half, WIDE, ONE, K, KP, BT, BN, DP
    )
    sums, next_column = first_sums(row_values, column_values, KP, BT)
    scores = tl.full([BT, KP], float("-inf"), tl.float32)
    chosen = tl.zeros([BT, KP], tl.int32)
    for rank in range(K):
        score, i, j, sums, next_column = next_pair(sums, next_column, row_values, column_values, K, KP)
        slot = pick(rows, i, KP) * n + pick(columns, j, KP)
        scores = tl.where(ranks[None, :] == rank, score[:, None], scores)
        chosen = tl.where(ranks[None, :] == rank, slot[:, None], chosen)
    return scores, chosen


@triton.jit
def weighted_row(bank, slots, shares, rank, valid, width, KP: tl.constexpr, VP: tl.constexpr):
    """The row [BT, VP] of each token's slot of this rank, times its share."""
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
    """Output [S, H, v], from query [S, H, 2 * half] of any strides but the last; if it KEEPS them, slots and weights [S, H, K]."""
    block, head = token_block_and_head(tokens, heads, BT, TOGETHER)
    token = block * BT + tl.arange(0, BT)
    valid = token < tokens
    scores, chosen = best_slots_of_keys(
        query, row_keys, column_keys, token, head, valid, n, half, token_stride, head_stride, WIDE, ONE, K, KP, BT, BN, DP,
    )  # fmt: skip
    ranks, lanes = tl.arange(0, KP), tl.arange(0, VP)
    shares = tl.exp((scores - tl.max(scores, axis=1)[:, None]) * inverse_temperature)
    shares = tl.where(ranks[None, :] < K, shares, 0.0)  # at any temperature
    shares = shares / tl.sum(shares, axis=1)[:, None]
    if KEEPS:
        entries = ((token * heads + head) * K)[:, None] + ranks[None, :]
        rank_mask = valid[:, None] & (ranks < K)[None, :]
        tl.store(slots + entries, chosen.to(slots.dtype.element_ty), mask=rank_mask)
        tl.store(weights + entries, shares, mask=rank_mask)

    # Slots are known before the first row is asked for, so that all rows are on their way at once.
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


def triton_forward(
    query: torch.Tensor,
    row_keys: torch.Tensor,
    column_keys: torch.Tensor,
    bank: torch.Tensor,
    residual: torch.Tensor | None,
    k: int,
    temperature: float,
    kept: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Output `[S, H, v]`; slots and weights are written into what is `kept` for a gradient, if anything is."""
    there = lookup_tensors(query, row_keys, column_keys, bank, residual, kept)
    (tokens, heads, _), (_, n, half), width = query.shape, row_keys.shape, bank.shape[-1]
    if tokens:
        is_wide = wide_products(query, row_keys)
        lanes = power_of_two(width)
        tile = _tile(query.device, n, k, half, lanes, tokens <= FEW_TOKENS, is_wide)
        with on_device_of(query):
            forward_kernel[(quotient_above(tokens, tile["BT"]) * heads,)](
                *there, tokens, heads, n, half, width, there.query.stride(0), there.query.stride(1), _bank_stride(there.bank),
                1.0 / temperature,
                ADDS=residual is not None, KEEPS=kept is not None, WIDE=is_wide, TOGETHER=HEADS_TOGETHER, K=k, **tile,
            )  # fmt: skip
    return there.output


@tiles("forward_kernel", BT=(16, 64), num_warps=(2, 8))
def _tile(changes: Changes, n: int, k: int, half: int, lanes: int, few: bool, is_wide: bool) -> Tile:
    return exact_tile(changes, n, k, half, few, is_wide, lanes) | {"VP": lanes}


def exact_tile(changes: Changes, n: int, k: int, half: int, few: bool, is_wide: bool, lanes: int = 1) -> Tile:
    """Sizes of a program that selects, of at most about 8,192 elements in its widest tile, also of `lanes` columns."""
    tile, dims = select_tile(n, k), max(16, power_of_two(half))
    tile |= {"BT": max(16, min(tile["BT"], 8192 // max(dims, lanes))), "DP": dims, "num_warps": 4}
    return tile | (_tile_of_few(tile["BN"], is_wide) if few else {}) | dict(changes)


def _tile_of_few(stretch: int, is_wide: bool) -> Tile:
    """What decoding has instead: as few rows as a product takes, and as few warps as hold them in registers.

    Compiled for compute capability 9.0, two warps need no more than 168 registers a thread, but spill some hundreds of bytes where
    products of float32 meet more than 64 sub-keys at a time.
    """
    return {"BT": FEW_TOKENS, "num_warps": 4 if is_wide and stretch > 64 else 2}


def wide_products(query: torch.Tensor, keys: torch.Tensor) -> bool:
    """Whether products are of float32: for such tensors, for tensors of two dtypes, and in the interpreter."""
    return query.dtype == torch.float32 or query.dtype != keys.dtype or interprets_kernels()


def _bank_stride(bank: torch.Tensor) -> int:
    """Elements from one head's bank to the next's; none where heads share one."""
    return bank.stride(0) if bank.dim() == 3 else 0

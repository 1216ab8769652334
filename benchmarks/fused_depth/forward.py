"""Kernel of attention to the sequence and the depth at once: the forward pass, and the tiles that all passes share.

A program takes a tile of rows: the query heads that share one head of keys and values, for some whole tokens, token
after token. The rows are multiplied with the keys of the sequence, block by block, then with the slots of all tokens of
the tile; a mask leaves each row the slots of its token. So the keys and slots that a group shares are loaded once, any
number of heads may share them, and no program reads another program's slots.

Without a gate, sequence and depth share one online softmax. With a gate, scores of the depth may be so much larger than
scores of the sequence that the sequence would vanish in a common sum; so each part has a separate sum, and the program
joins the two outputs. Inside the kernel, exponentials are powers of two; the sums that it writes are natural
logarithms.

As in other attention kernels, a non-finite number also spoils the outputs of other rows of its tile.

Sizes: B texts, H query heads, K heads of keys and values, T tokens, n slots, R runs of slots; `BM` rows per tile, H / K
for each of `BT` whole tokens; `BN` keys of the sequence, and `BS` rows of slots, that are read at once; `DP` the power
of two at or above the width of a head.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from midus_hf.ops.depth.triton.forward import last_dense, run_of_table, slot_rows, slot_table
from midus_hf.ops.dispatch.tiles import Changes, Tile, tiles
from midus_hf.ops.dispatch.triton import on_device_of, power_of_two, product, product_precision, tl, triton

# Most keys of the sequence that are read at once.
MOST_KEYS = 128


class Read(NamedTuple):
    """Results of the forward pass, all laid out in memory token by token.

    Args:
        output: What heads read of both parts, `[B, H, T, d]`.
        sequence: What heads read of the sequence, `[B, H, T, d]`; empty without a gate, or if the parts are not kept.
        depth: What heads read of the depth, `[B, H, T, d]`; empty without a gate, or if the parts are not kept.
        lse: Logarithm of the sum of exponentials, `[B, H, T]`, float32: of the sequence with a gate, else of both
            parts.
        depth_lse: Logarithm of the sum of exponentials of the depth, `[B, H, T]`, float32; empty without a gate.
    """

    output: torch.Tensor
    sequence: torch.Tensor
    depth: torch.Tensor
    lse: torch.Tensor
    depth_lse: torch.Tensor


@triton.jit
def row_places(first, tokens, BT: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr):
    """Return for the rows of a tile [BM] the token, the query head within the group, and whether the row exists."""
    row = tl.arange(0, BM)
    token = first + row // GROUP
    return token, row % GROUP, (row < BT * GROUP) & (token < tokens)


@triton.jit
def rows_at(heads, offset, there, WIDTH: tl.constexpr, DP: tl.constexpr):
    """Load rows of heads [BM, DP] that begin at some offsets; 0 for rows that do not exist."""
    dims = tl.arange(0, DP)
    mask = there[:, None] & (dims < WIDTH)[None, :]
    return tl.load(heads + offset[:, None] + dims[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(tile, heads, row, there, WIDTH: tl.constexpr, DP: tl.constexpr):
    """Store rows [BM, DP] into contiguous rows of heads, at the row numbers `row`."""
    dims = tl.arange(0, DP)
    mask = there[:, None] & (dims < WIDTH)[None, :]
    tl.store(heads + row[:, None] * WIDTH + dims[None, :], tile.to(heads.dtype.element_ty), mask=mask)


@triton.jit
def columns_of_slots(start, first, first_token, tokens, BT: tl.constexpr, BS: tl.constexpr):
    """Return for the rows of slots [BS] of a tile the slot, from `first` on, the token, and whether the token exists.

    The tokens of one slot are adjacent.
    """
    column = start + tl.arange(0, BS)
    token = first_token + column % BT
    return first + column // BT, token, token < tokens


@triton.jit
def met(scores, value, highest, total, read, PRECISION: tl.constexpr, BARE: tl.constexpr):
    """Return the highest score, the sum and the output of an online softmax after further keys.

    With `BARE`, a row may have no unmasked key so far.
    """
    above = tl.maximum(highest, tl.max(scores, axis=1))
    level = above
    if BARE:
        level = tl.where(above == float("-inf"), 0.0, above)
    shares = tl.exp2(scores - level[:, None])
    shrink = tl.exp2(highest - level)
    total = total * shrink + tl.sum(shares, axis=1)
    return above, total, read * shrink[:, None] + product(shares, value, PRECISION)


@triton.jit
def parts_of_rows(sequence_lse, depth_lse, c, ADDED: tl.constexpr):
    """Return the factors of rows [BM] for the outputs of sequence and depth, and the share of the depth in one softmax."""
    ratio = tl.exp(tl.minimum(depth_lse - sequence_lse, 80.0))
    share = ratio / (1 + ratio)
    of_depth = c * share
    if ADDED:
        of_depth = of_depth + (1 - c)
    return (1 - c) + c / (1 + ratio), of_depth, share


@triton.jit
def fused_forward_kernel(
    query, key, value, table, gate, output, of_sequence, of_depth, lse, depth_lse,
    tokens, kv_heads, texts, slots, runs,
    query_text, query_head, query_token, key_text, key_head, key_token, value_text, value_head, value_token, scaling,
    CAUSAL: tl.constexpr, APART: tl.constexpr, ADDED: tl.constexpr, KEEPS: tl.constexpr, UNIT: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BM: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Write the output [B, T, H, d] and log-sum-exps [B, T, H].

    With `APART` there is a gate [H], and sequence and depth have separate sums; `ADDED` is the option of
    `joint_attention`; with `KEEPS` the outputs of both parts are written too.
    """
    program = tl.program_id(0)
    tile = tl.cdiv(tokens, BT) - 1 - program // (texts * kv_heads)  # tiles with the most keys start first
    text = ((program // kv_heads) % texts).to(tl.int64)
    kv_head = (program % kv_heads).to(tl.int64)
    first_token = tile * BT
    token, member, there = row_places(first_token, tokens, BT, GROUP, BM)
    head = kv_head * GROUP + member
    at = text * query_text + head * query_head + token.to(tl.int64) * query_token
    queries = rows_at(query, at, there, WIDTH, DP)
    scale = scaling * 1.4426950408889634
    highest = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    read = tl.zeros([BM, DP], tl.float32)
    key += text * key_text + kv_head * key_head
    value += text * value_text + kv_head * value_head
    near, every = tl.arange(0, BN), tl.full([BN], True, tl.int1)
    all_see = (first_token if CAUSAL else tokens) // BN * BN
    for start in range(0, all_see, BN):
        position = start + near
        keys = rows_at(key, position.to(tl.int64) * key_token, every, WIDTH, DP)
        values = rows_at(value, position.to(tl.int64) * value_token, every, WIDTH, DP)
        scores = product(queries, tl.trans(keys), PRECISION) * scale  # [BM, BN]
        highest, total, read = met(scores, values, highest, total, read, PRECISION, False)
    for start in range(all_see, tl.minimum(first_token + BT, tokens) if CAUSAL else tokens, BN):
        position = start + near
        keys = rows_at(key, position.to(tl.int64) * key_token, position < tokens, WIDTH, DP)
        values = rows_at(value, position.to(tl.int64) * value_token, position < tokens, WIDTH, DP)
        scores = product(queries, tl.trans(keys), PRECISION) * scale
        seen = (position < tokens)[None, :]
        if CAUSAL:
            seen = seen & (position[None, :] <= token[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        highest, total, read = met(scores, values, highest, total, read, PRECISION, False)
    row = (text * tokens + token) * kv_heads * GROUP + head
    if APART:
        alone = read / total[:, None]
        alone_lse = (highest + tl.log2(total)) * 0.6931471805599453
        highest = tl.full([BM], float("-inf"), tl.float32)
        total = tl.zeros([BM], tl.float32)
        read = tl.zeros([BM, DP], tl.float32)
    first = 0
    for run in range(runs):
        end = tl.load(table + run * 7).to(tl.int32)
        for start in range(0, (end - first) * BT, BS):
            slot, owner, exists = columns_of_slots(start, first, first_token, tokens, BT, BS)
            exists = exists & (slot < end)
            _, key_offset, value_offset = run_of_table(table + run * 7, text, kv_head, owner.to(tl.int64))
            places, mask = slot_rows(table + runs * 7, slot, exists, key_offset, query, WIDTH, UNIT, DP)
            keys = tl.load(places, mask=mask, other=0.0)
            places, mask = slot_rows(table + runs * 7 + slots, slot, exists, value_offset, query, WIDTH, UNIT, DP)
            values = tl.load(places, mask=mask, other=0.0)
            scores = product(queries, tl.trans(keys), PRECISION) * scale  # [BM, BS]
            scores = tl.where(exists[None, :] & (owner[None, :] == token[:, None]), scores, float("-inf"))
            highest, total, read = met(scores, values, highest, total, read, PRECISION, APART)
        first = end
    if APART:
        # Rows that do not exist have read no slot, and their sum is 0.
        read = read / tl.where(there, total, 1.0)[:, None]
        own_lse = (highest + tl.log2(tl.where(there, total, 1.0))) * 0.6931471805599453
        left, taken, _ = parts_of_rows(alone_lse, own_lse, tl.load(gate + head), ADDED)
        tl.store(lse + row, alone_lse, mask=there)
        tl.store(depth_lse + row, own_lse, mask=there)
        if KEEPS:
            store_rows(alone, of_sequence, row, there, WIDTH, DP)
            store_rows(read, of_depth, row, there, WIDTH, DP)
        read = left[:, None] * alone + taken[:, None] * read
    else:
        read = read / total[:, None]
        tl.store(lse + row, (highest + tl.log2(total)) * 0.6931471805599453, mask=there)
    store_rows(read, output, row, there, WIDTH, DP)


def triton_fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    scaling: float,
    is_causal: bool,
    gate: torch.Tensor | None,
    added: bool,
    keeps: bool,
) -> Read:
    """Return what heads read of the sequence and the depth, as `joint_attention` joins them.

    Args:
        query: `[B, H, T, d]`.
        key: Key of the sequence, `[B, K, T, d]`.
        value: Value of the sequence, `[B, K, T, d]`.
        keys: Key of each of n slots, `[B, K, T, d]`.
        values: Value of each slot, `[B, K, T, d]`.
        scaling: Factor of scores.
        is_causal: Whether query t reads only keys of the sequence up to t.
        gate: c of each head, `[H]`; None for 1.
        added: Whether (1 - c) times what heads read of the depth is added.
        keeps: Whether the outputs of sequence and depth are wanted besides the joint output.
    """
    query, key, value = map(last_dense, (query, key, value))
    (texts, heads, tokens, width), kv_heads = query.shape, key.shape[1]
    apart = gate is not None
    output = query.new_empty(texts, tokens, heads, width)
    parts = [query.new_empty((texts, tokens, heads, width) if apart and keeps else (0, 0, 0, 0)) for _ in range(2)]
    sums = [
        torch.empty(shape, dtype=torch.float32, device=query.device)
        for shape in ((texts, tokens, heads), (texts, tokens, heads) if apart else (0, 0, 0))
    ]
    if output.numel():
        tile = _tile(query.device, *fused_shape(query, kv_heads, len(keys)), apart)
        table = slot_table(keys, values)
        with on_device_of(query):
            fused_forward_kernel[(programs(query, kv_heads, tile["BT"]),)](
                query, key, value, table.numbers, of_heads(query, gate), output, *parts, *sums,
                tokens, kv_heads, texts, len(keys), table.runs,
                *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], scaling,
                CAUSAL=is_causal, APART=apart, ADDED=added, KEEPS=keeps, UNIT=table.unit, WIDTH=width,
                PRECISION=product_precision(query), **tile,
            )  # fmt: skip
    return Read(*(made.transpose(1, 2) for made in (output, *parts, *sums)))


def of_heads(query: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """Return c of each head, `[H]`, float32; 1 without a gate."""
    return query.new_ones(query.shape[1], dtype=torch.float32) if gate is None else gate.float().contiguous()


def programs(query: torch.Tensor, kv_heads: int, tile_tokens: int) -> int:
    """Return the number of programs of a launch over all query heads, with `tile_tokens` tokens per program."""
    return -(-query.shape[2] // tile_tokens) * query.shape[0] * kv_heads


def fused_shape(query: torch.Tensor, kv_heads: int, slots: int) -> tuple[int, int, int, int]:
    """Return the numbers that tiles depend on: H / K, DP, bytes per element, and the power of two at or above n, up to 128."""
    return query.shape[1] // kv_heads, padded_width(query), query.element_size(), min(MOST_KEYS, power_of_two(slots))


def fused_tile(changes: Changes, rows: int, keys: int, warps: int, group: int, dims: int, slots: int) -> Tile:
    """Return the sizes of a program.

    Args:
        changes: Values that replace BM, BN or the number of warps.
        rows: Rows per tile, BM.
        keys: Keys of the sequence that are read at once, BN.
        warps: Warps per program.
        group: Query heads per head of keys and values, H / K.
        dims: Padded width of a head, DP.
        slots: The power of two at or above n, from `fused_shape`.
    """
    tile = {"BM": rows, "BN": keys, "num_warps": warps, **changes}
    tile_tokens = tile["BM"] // group
    slots_at_once = min(tile["BN"], max(16, power_of_two(slots * tile_tokens)))
    return tile | {"GROUP": group, "BT": tile_tokens, "DP": dims, "BS": slots_at_once, "num_stages": 2}


def padded_width(query: torch.Tensor) -> int:
    """Return DP, the power of two at or above the width of a head, at least 16."""
    return max(16, power_of_two(query.shape[-1]))


@tiles("fused_forward_kernel", BM=(64, 128), BN=(16, MOST_KEYS), num_warps=(2, 8))
def _tile(changes: Changes, group: int, dims: int, element: int, slots: int, apart: bool) -> Tile:
    """Return the sizes by the bytes of a row; two separate sums need the registers of twice as many threads."""
    row_bytes = dims * element
    sizes = (128, 64, 8 if apart or row_bytes > 128 else 4) if row_bytes <= 256 else (64, 32, 8)
    return fused_tile(changes, *sizes, group, dims, slots)

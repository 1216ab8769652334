"""The fused head-wise lookup for half precision: scores carry their column in their last bits, and are sorted in registers.

What is given up against `forward_kernel`, which compares all 32 bits of a score: the last ceil(log2(n)) bits of the float32 score of
a sub-key are replaced by its number, and the last 2 ceil(log2(k)) of a sum of two by the ranks of both. Of slots whose scores are
closer than that, any may be taken, and weights are those of the changed scores: for n = 64 each changes by less than 2^-17 of its
size, where rounding a query to bfloat16 has changed it by up to 2^-9. Of 65,536 rows of normal numbers (n = 64, k = 4, d = 64,
bfloat16, in the interpreter) 6 took another slot, and gave up 5.3e-6 at most of scores of some 1; weights differ by 3.2e-6 (RMS).
Ties go to the larger number where scores are positive, to the smaller where they are not.

Where a head has more blocks of tokens than its share of a GPU has room for programs, each program reads the sub-keys of its head once
and walks over several blocks. Which program has a block changes no bit of what is found.

Shapes: as in `product_key/triton/exact.py`.
"""

import torch

from midus_hf.ops.dispatch.tiles import Changes, Tile, tiles
from midus_hf.ops.dispatch.triton import multiprocessors, on_device_of, power_of_two, quotient_above, tl, triton
from midus_hf.ops.headwise.inputs import LookupInputs, room_for_gradient
from midus_hf.ops.headwise.triton.exact import lookup_tensors, triton_forward
from midus_hf.ops.product_key.triton.exact import FEW_TOKENS, HEADS_TOGETHER, token_block_and_head, wide_products
from midus_hf.ops.product_key.triton.packed import (
    LOWEST,
    best_slots_of_block,
    load_tile,
    packed_tile,
    packs,
    stacked,
    store_tile,
    turned_keys,
)

PROGRAMS_A_MULTIPROCESSOR = 8
"""Of heads that run side by side, before programs take several blocks: more than fit, so that the last leave little of it idle."""

_LOG2_E = 1.4426950408889634


@triton.jit
def look_up_block(
    query, rows_of_head, columns_of_head, bank_of_head, residual, output, slots, weights,
    block, head, tokens, token_stride, head_stride, scale,
    HEADS: tl.constexpr, N: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, IS_EVEN: tl.constexpr,
    ADDS: tl.constexpr, KEEPS: tl.constexpr, WIDE: tl.constexpr, BITS: tl.constexpr, RANK_BITS: tl.constexpr,
    LOWEST: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
    DP: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """What a block of BT tokens retrieves from one head, whose sub-keys [DP, BN] are at hand."""
    first = block * BT
    token = tl.arange(0, BT)
    valid = first + token < tokens
    lanes = tl.arange(0, VP)
    found = best_slots_of_block(
        query, rows_of_head, columns_of_head, first, head, valid, token_stride, head_stride,
        N, HALF, IS_EVEN, WIDE, BITS, RANK_BITS, LOWEST, K, KP, BT, BN, DP,
    )  # fmt: skip
    scores = found[:K]
    total = tl.zeros([BT], tl.float32)
    for rank in tl.static_range(K):
        total += tl.exp2((scores[rank] - scores[0]) * scale)
    part = 1.0 / total
    chosen, shares = found[K:], ()
    for rank in tl.static_range(K):
        shares = shares + (tl.exp2((scores[rank] - scores[0]) * scale) * part,)
    for _ in tl.static_range(KP - K):
        chosen, shares = chosen + (found[2 * K - 1],), shares + (tl.zeros([BT], tl.float32),)
    if KEEPS:
        ranks = tl.arange(0, KP)
        before = (first * HEADS + head) * K
        entries = token[:, None] * (HEADS * K) + ranks[None, :]  # [BT, KP]
        rank_mask = valid[:, None] & (ranks < K)[None, :]
        store_tile(slots + before + entries, stacked(chosen), rank_mask, IS_EVEN and K == KP)
        store_tile(weights + before + entries, stacked(shares), rank_mask, IS_EVEN and K == KP)
    # All rows of one rank lie behind those of another, so that each thread has every rank of the tokens that it has.
    for start in tl.static_range(0, KP, GROUP):
        asked_slots = tl.reshape(tl.trans(stacked(chosen[start : start + GROUP])), [GROUP * BT])
        there_is = (start + tl.arange(0, GROUP) < K)[:, None] & valid[None, :]
        row_mask = tl.reshape(there_is, [GROUP * BT])[:, None] & (lanes < WIDTH)[None, :]
        asked_rows = bank_of_head + (asked_slots[:, None] * WIDTH + lanes[None, :])  # [GROUP * BT, VP]
        found = load_tile(asked_rows, row_mask, IS_EVEN and K == KP and VP == WIDTH).to(tl.float32)
        weighed = found * tl.reshape(tl.trans(stacked(shares[start : start + GROUP])), [GROUP * BT])[:, None]
        of_group = tl.sum(tl.reshape(weighed, [GROUP, BT, VP]), axis=0)  # [BT, VP]
        if start == 0:
            gathered = of_group
        else:
            gathered += of_group
    before = (first * HEADS + head) * WIDTH
    there = token[:, None] * (HEADS * WIDTH) + lanes[None, :]
    lane_mask = valid[:, None] & (lanes < WIDTH)[None, :]
    if ADDS:
        gathered += load_tile(residual + before + there, lane_mask, IS_EVEN and VP == WIDTH).to(tl.float32)
    store_tile(output + before + there, gathered, lane_mask, IS_EVEN and VP == WIDTH)


@triton.jit
def packed_forward_kernel(
    query, row_keys, column_keys, bank, residual, output, slots, weights,
    tokens, token_stride, head_stride, walk, scale,
    HEADS: tl.constexpr, N: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, IS_EVEN: tl.constexpr,
    HAS_OWN_BANKS: tl.constexpr, ADDS: tl.constexpr, KEEPS: tl.constexpr, WALKS: tl.constexpr, WIDE: tl.constexpr,
    TOGETHER: tl.constexpr, BITS: tl.constexpr, RANK_BITS: tl.constexpr, LOWEST: tl.constexpr, GROUP: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """As `forward_kernel`; `scale` is log2(e) over the temperature, and IS_EVEN says that tokens fill all blocks.

    A program has one block of tokens, or WALKS over up to `walk` of one head, as many apart as the head has programs.
    """
    block, head = token_block_and_head(tokens, HEADS, BT * walk, TOGETHER)
    keys_of_head = head * (N * HALF)
    rows_of_head = turned_keys(row_keys + keys_of_head, N, HALF, BN, DP)
    columns_of_head = turned_keys(column_keys + keys_of_head, N, HALF, BN, DP)
    bank_of_head = bank + (head * (N * N * WIDTH) if HAS_OWN_BANKS else 0)
    if WALKS:
        programs = tl.cdiv(tokens, BT * walk)
        # Two products and more than one stage do not compile for compute capability 9.0. Addresses that are kept from block to
        # block and not made anew would take the registers of further programs.
        for place in tl.range(block.to(tl.int32), tl.cdiv(tokens, BT), programs, num_stages=1, disable_licm=True):
            look_up_block(
                query, rows_of_head, columns_of_head, bank_of_head, residual, output, slots, weights,
                tl.cast(place, tl.int64), head, tokens, token_stride, head_stride, scale, HEADS, N, HALF, WIDTH,
                IS_EVEN, ADDS, KEEPS, WIDE, BITS, RANK_BITS, LOWEST, GROUP, K, KP, BT, BN, DP, VP,
            )  # fmt: skip
    else:
        look_up_block(
            query, rows_of_head, columns_of_head, bank_of_head, residual, output, slots, weights,
            block, head, tokens, token_stride, head_stride, scale, HEADS, N, HALF, WIDTH,
            IS_EVEN, ADDS, KEEPS, WIDE, BITS, RANK_BITS, LOWEST, GROUP, K, KP, BT, BN, DP, VP,
        )  # fmt: skip


def triton_lookup(inputs: LookupInputs, exact: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output `[S, H, v]`, and for a gradient slots `[S, H, k]` and weights `[S, H, k]`, float32."""
    kept = room_for_gradient(inputs)
    return triton_output(inputs, exact, kept), *kept


def triton_output(
    inputs: LookupInputs, exact: bool, kept: tuple[torch.Tensor, torch.Tensor] | None = None
) -> torch.Tensor:
    """Return the output alone, by the kernel that fits, which compares all bits of scores where `exact` says so."""
    is_packed = not exact and packs(inputs.query.dtype, inputs.row_keys.shape[1], inputs.k)
    return (packed_forward if is_packed else triton_forward)(inputs, kept)


def packed_forward(inputs: LookupInputs, kept: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    """Return what `triton_forward` does, of what `packs`."""
    query, row_keys, _, bank, residual, k, temperature = inputs
    there = lookup_tensors(inputs, kept)
    (tokens, heads, _), (_, n, half), width = query.shape, row_keys.shape, bank.shape[-1]
    if tokens:
        tile = _tile(query.device, n, k, half, width, tokens <= FEW_TOKENS)
        walk = blocks_a_program(quotient_above(tokens, tile["BT"]), heads, multiprocessors(query))
        tile = tile | _few_registers(tile) if walk > 1 else tile
        with on_device_of(query):
            packed_forward_kernel[(quotient_above(tokens, tile["BT"] * walk) * heads,)](
                *there, tokens, there.query.stride(0), there.query.stride(1), walk, _LOG2_E / temperature,
                HEADS=heads, N=n, HALF=half, WIDTH=width, IS_EVEN=tokens % tile["BT"] == 0, HAS_OWN_BANKS=bank.dim() == 3,
                ADDS=residual is not None, KEEPS=kept is not None, WALKS=walk > 1,
                WIDE=wide_products(query, row_keys), TOGETHER=HEADS_TOGETHER, LOWEST=LOWEST, K=k, **tile,
            )  # fmt: skip
    return there.output


def blocks_a_program(blocks: int, heads: int, multiprocessors: int) -> int:
    """How many of the blocks of tokens of a head each program takes, one after the other, at most."""
    return quotient_above(blocks, multiprocessors * PROGRAMS_A_MULTIPROCESSOR // min(heads, HEADS_TOGETHER))


@tiles("packed_forward_kernel", BT=(16, 128), num_warps=(1, 8))
def _tile(changes: Changes, n: int, k: int, half: int, width: int, few: bool) -> Tile:
    lanes = power_of_two(width)
    tile = packed_tile(changes, n, k, half, few, lanes)
    # GROUP: ranks whose rows registers hold at once
    return tile | {"GROUP": max(1, min(tile["KP"], 32768 // (tile["BT"] * lanes))), "VP": lanes}


def _few_registers(tile: Tile) -> Tile:
    """The most registers a thread for programs that walk, of tiles that fit: what programs of one block take.

    As many programs fit a multiprocessor of NVIDIA's then. Left alone, the compiler takes up to half as many again. At compute
    capability 9.0 nothing is spilled of the papers' shapes, and at most 24 bytes of others.
    """
    ranks, lanes = tile["KP"], max(tile["VP"], 2 * tile["DP"])
    is_usual = tile["BN"] <= 64 and ranks * lanes <= 512 and tile["BT"] <= 64 and tile["num_warps"] == 4
    if torch.version.hip or not is_usual:
        return {}
    return {"maxnreg": 96 if ranks <= 4 and lanes <= 64 else 168}

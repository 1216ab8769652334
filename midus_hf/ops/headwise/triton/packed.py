"""The fused head-wise lookup for half precision: scores carry their column in their last bits, and are sorted in registers.

This loses precision against `forward_kernel`, which compares all 32 bits of a score. The last bits of the float32 score
of a sub-key (`OpChoices.exact` says how many) are replaced by the sub-key's number, and the last 2 ceil(log2(k)) bits
of a sum of two scores by the ranks of both. If only these bits tell scores apart, any of their slots may be chosen.
Weights are computed from the changed scores: for n = 64 a score changes by less than 2^-17 of its size, whereas
rounding a query to bfloat16 has changed it by up to 2^-9. Among 65,536 rows of normal numbers (n = 64, k = 4, d = 64,
bfloat16, in the interpreter) 6 chose another slot, whose score was lower by at most 5.3e-6 with scores around 1;
weights differ by 3.2e-6 (RMS). Ties go to the larger number if scores are positive, else to the smaller.

If a head has more blocks of tokens than its share of a GPU has room for programs, each program reads the sub-keys of
its head once and walks over several blocks. Which program has a block changes no bit of the result.

Sizes are as in `product_key/triton/exact.py`.
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

# Most programs per multiprocessor for the heads that run together; with more blocks, each program takes several. This
# is more than fit at once, so that the last programs leave few multiprocessors idle.
PROGRAMS_A_MULTIPROCESSOR = 8

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
    """Write the output of a block of BT tokens for one head, whose sub-keys [DP, BN] are loaded; if KEEPS, slots and weights too."""
    first = block * BT
    token = tl.arange(0, BT)
    valid = first + token < tokens
    lanes = tl.arange(0, VP)
    best = best_slots_of_block(
        query, rows_of_head, columns_of_head, first, head, valid, token_stride, head_stride,
        N, HALF, IS_EVEN, WIDE, BITS, RANK_BITS, LOWEST, K, KP, BT, BN, DP,
    )  # fmt: skip
    scores = best[:K]
    total = tl.zeros([BT], tl.float32)
    for rank in tl.static_range(K):
        total += tl.exp2((scores[rank] - scores[0]) * scale)
    part = 1.0 / total
    chosen, shares = best[K:], ()
    for rank in tl.static_range(K):
        shares = shares + (tl.exp2((scores[rank] - scores[0]) * scale) * part,)
    for _ in tl.static_range(KP - K):
        chosen, shares = chosen + (best[2 * K - 1],), shares + (tl.zeros([BT], tl.float32),)
    if KEEPS:
        ranks = tl.arange(0, KP)
        before = (first * HEADS + head) * K
        entries = token[:, None] * (HEADS * K) + ranks[None, :]  # [BT, KP]
        rank_mask = valid[:, None] & (ranks < K)[None, :]
        store_tile(slots + before + entries, stacked(chosen), rank_mask, IS_EVEN and K == KP)
        store_tile(weights + before + entries, stacked(shares), rank_mask, IS_EVEN and K == KP)
    # Rows are ordered by rank, then token, so that each thread holds all ranks of its tokens.
    for start in tl.static_range(0, KP, GROUP):
        group_slots = tl.reshape(tl.trans(stacked(chosen[start : start + GROUP])), [GROUP * BT])
        there_is = (start + tl.arange(0, GROUP) < K)[:, None] & valid[None, :]
        row_mask = tl.reshape(there_is, [GROUP * BT])[:, None] & (lanes < WIDTH)[None, :]
        row_pointers = bank_of_head + (group_slots[:, None] * WIDTH + lanes[None, :])  # [GROUP * BT, VP]
        rows = load_tile(row_pointers, row_mask, IS_EVEN and K == KP and VP == WIDTH).to(tl.float32)
        weighed = rows * tl.reshape(tl.trans(stacked(shares[start : start + GROUP])), [GROUP * BT])[:, None]
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
    """Write the results of `forward_kernel`; `scale` is log2(e) over the temperature, and IS_EVEN says that tokens fill all blocks.

    A program has one block of tokens or, if WALKS, up to `walk` blocks of one head, spaced by the number of the head's
    programs.
    """
    block, head = token_block_and_head(tokens, HEADS, BT * walk, TOGETHER)
    keys_of_head = head * (N * HALF)
    rows_of_head = turned_keys(row_keys + keys_of_head, N, HALF, BN, DP)
    columns_of_head = turned_keys(column_keys + keys_of_head, N, HALF, BN, DP)
    bank_of_head = bank + (head * (N * N * WIDTH) if HAS_OWN_BANKS else 0)
    if WALKS:
        programs = tl.cdiv(tokens, BT * walk)
        # With two products, more than one stage does not compile for compute capability 9.0. Without disable_licm, addresses would be
        # kept from block to block instead of computed anew, and take registers from further programs.
        for block_of_walk in tl.range(
            block.to(tl.int32), tl.cdiv(tokens, BT), programs, num_stages=1, disable_licm=True
        ):
            look_up_block(
                query, rows_of_head, columns_of_head, bank_of_head, residual, output, slots, weights,
                tl.cast(block_of_walk, tl.int64), head, tokens, token_stride, head_stride, scale, HEADS, N, HALF, WIDTH,
                IS_EVEN, ADDS, KEEPS, WIDE, BITS, RANK_BITS, LOWEST, GROUP, K, KP, BT, BN, DP, VP,
            )  # fmt: skip
    else:
        look_up_block(
            query, rows_of_head, columns_of_head, bank_of_head, residual, output, slots, weights,
            block, head, tokens, token_stride, head_stride, scale, HEADS, N, HALF, WIDTH,
            IS_EVEN, ADDS, KEEPS, WIDE, BITS, RANK_BITS, LOWEST, GROUP, K, KP, BT, BN, DP, VP,
        )  # fmt: skip


def triton_lookup(inputs: LookupInputs, exact: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output `[S, H, v]`, and for the gradient slots `[S, H, k]` and weights `[S, H, k]`, float32."""
    kept = room_for_gradient(inputs)
    return triton_output(inputs, exact, kept), *kept


def triton_output(
    inputs: LookupInputs, exact: bool, kept: tuple[torch.Tensor, torch.Tensor] | None = None
) -> torch.Tensor:
    """Return the output only, `[S, H, v]`. With `exact`, the kernel that compares all bits of scores is chosen."""
    is_packed = not exact and packs(inputs.query.dtype, inputs.row_keys.shape[1], inputs.k)
    return (packed_forward if is_packed else triton_forward)(inputs, kept)


def packed_forward(inputs: LookupInputs, kept: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    """Compute `triton_forward` by the packed kernel, for inputs that `packs` accepts."""
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
    """Return the most blocks of a head's tokens that one program takes, one after the other."""
    return quotient_above(blocks, multiprocessors * PROGRAMS_A_MULTIPROCESSOR // min(heads, HEADS_TOGETHER))


@tiles("packed_forward_kernel", BT=(16, 128), num_warps=(1, 8))
def _tile(changes: Changes, n: int, k: int, half: int, width: int, few: bool) -> Tile:
    lanes = power_of_two(width)
    tile = packed_tile(changes, n, k, half, few, lanes)
    # GROUP is the number of ranks whose rows registers hold at once.
    return tile | {"GROUP": max(1, min(tile["KP"], 32768 // (tile["BT"] * lanes))), "VP": lanes}


def _few_registers(tile: Tile) -> Tile:
    """Return the limit of registers per thread for programs that walk, or an empty dict for tiles without a known limit.

    The limit is the number that programs of one block take, so that as many programs fit a multiprocessor. On NVIDIA,
    the compiler takes up to half as many again without the limit. At compute capability 9.0, nothing spills with the
    papers' shapes, and at most 24 bytes with others.
    """
    ranks, lanes = tile["KP"], max(tile["VP"], 2 * tile["DP"])
    is_usual = tile["BN"] <= 64 and ranks * lanes <= 512 and tile["BT"] <= 64 and tile["num_warps"] == 4
    if torch.version.hip or not is_usual:
        return {}
    return {"maxnreg": 96 if ranks <= 4 and lanes <= 64 else 168}

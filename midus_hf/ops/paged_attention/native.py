"""Attention to extra keys and to a paged cache in compiled C, for float32 and bfloat16 on a CPU.

One thread writes each result, in the order of keys: neither the number of threads nor other tokens change a bit.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from midus_hf.ops.dispatch.library import PAGED_ATTENTION_CALL, PAGED_PART, refuse_places, run


class BlockLayout(NamedTuple):
    """Where numbers of keys and values lie in a block of N tokens, K heads and d features."""

    sizes: tuple[int, int, int]  # N, K, d
    keys: tuple[int, int, int, int]  # the place of the first number, and strides of tokens, heads and features
    values: tuple[int, int, int, int]


class ExtraKeys:
    """Keys and values that tokens read in addition to those of a cache, `[K, S, d]` by layer, where C finds them."""

    def __init__(self, heads: Iterable[tuple[Tensor, Tensor]]):
        self._tables = [table.contiguous() for both in heads for table in both]
        self.dtype = self._tables[0].dtype
        assert all(table.is_cpu and table.dtype == self.dtype for table in self._tables)
        self.pointers = torch.tensor([table.data_ptr() for table in self._tables])


class ExtraReads(NamedTuple):
    """Neighbouring tokens of a request, T, that read extra keys, S."""

    extra: ExtraKeys
    reads: Tensor  # [T, S], bool, whether a token reads a key
    bias: Tensor | None  # [T, S], float32, added to scores; None for 0
    request: int  # number of the request
    token: int  # number of the first token among all
    position: int  # position of the first token


class PreparedReads:
    """What tokens of a pass read, for all layers whose blocks stand in one table.

    Args:
        parts: The tokens that read extra keys.
        table: `[R, n]`, integers, blocks of each request in the order of its tokens.
    """

    def __init__(self, parts: Sequence[ExtraReads], table: Tensor):
        assert table.is_cpu and table.stride(1) == 1
        self.count, self.dtype, self.block_bytes = len(parts), parts[0].extra.dtype, table.itemsize
        #: Number of keys that tokens read, at least.
        self.num_read = 0
        self._held: list[object] = [table]
        packed = []
        for extra, reads, bias, request, token, position in parts:
            reads, bias = reads.contiguous(), None if bias is None else bias.contiguous()
            assert extra.dtype == self.dtype and reads.dtype == torch.bool
            self._held.append((extra, reads, bias))
            pointers = (extra.pointers.data_ptr(), reads.data_ptr(), 0 if bias is None else bias.data_ptr())
            blocks = table.data_ptr() + request * table.stride(0) * table.itemsize
            packed.append(PAGED_PART.pack(*pointers, blocks, token, len(reads), position, reads.shape[1]))
            self.num_read += len(reads) * (position + reads.shape[1])
        self._packed = torch.frombuffer(bytearray(b"".join(packed)), dtype=torch.uint8)
        self.pointer = self._packed.data_ptr()


def native_refusal(layout: BlockLayout) -> str | None:
    """Return why the compiled code does not read such blocks, and what it expects; None if it does."""
    tokens, _, width = layout.sizes
    is_read = (layout.keys[1], layout.keys[3], layout.values[1], layout.values[3]) == (1, tokens, width, 1)
    return None if is_read else "blocks do not hold each head's keys [d, tokens] and values [tokens, d]; expected such"


def native_paged_attention(
    output: Tensor,
    query: Tensor,
    prepared: PreparedReads,
    layer: int,
    cache: Tensor,
    layout: BlockLayout,
    scale: float,
    window: int | None,
) -> None:
    """Overwrite the output of tokens that read an extra key, by attention to extra keys and to their request's in a cache.

    Args:
        output: `[A, H d]`, of all tokens.
        query: `[H, A, d]`, of all tokens.
        prepared: Which tokens read which extra keys. A token reads its request's keys up to its own.
        layer: Number of the layer among those of the extra keys.
        cache: `[B, ...]`, contiguous blocks of this layer.
        layout: Where keys and values lie in a block.
        scale: Factor of scores.
        window: How many tokens of its request a token reads at most, itself included. None for all.

    Raises:
        ValueError: If a tensor is not on the CPU.
    """
    if not (output.is_cpu and query.is_cpu and cache.is_cpu):
        refuse_places({"output": output, "query": query, "cache": cache})
    assert prepared.dtype == cache.dtype == query.dtype == output.dtype
    assert cache.is_contiguous() and query.stride(2) == output.stride(1) == 1
    block_tokens, heads, width = layout.sizes
    run(
        "midus_paged_attention",
        PAGED_ATTENTION_CALL,
        prepared.num_read * heads,
        *(query.data_ptr(), cache.data_ptr(), output.data_ptr(), prepared.pointer),
        *(scale, layer, prepared.count, heads, query.shape[0] // heads, width, block_tokens, prepared.block_bytes),
        *(query.stride(1), query.stride(0), output.stride(0), cache.stride(0)),
        *(layout.keys[0], layout.keys[2], layout.values[0], layout.values[2]),
        *(window or 0, cache.dtype == torch.bfloat16),
    )

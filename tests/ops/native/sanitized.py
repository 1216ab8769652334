"""Calls every function of libraries that sanitizers watch, at sizes that do not fill vectors, blocks or segments.

Run as `python sanitized.py LIBRARY` with the address sanitizer's own library preloaded; the first fault ends the process.
Tensors are exactly as long as what they hold, so that C meets the sanitizer's guard bytes where it reads or writes beyond them.
"""

import itertools
import sys
from pathlib import Path

import torch

from midus_hf.ops.dispatch import library
from midus_hf.ops.gather.native import (
    native_bank_gradient,
    native_gathered_products,
    native_row_sums,
    native_weighted_rows,
)
from midus_hf.ops.paged_attention.native import (
    BlockLayout,
    ExtraKeys,
    ExtraReads,
    PreparedReads,
    native_paged_attention,
)
from midus_hf.ops.product_key.native import LookupInputs, native_lookup, native_score_gradients, native_scores

# tokens, heads, n, half, width, k
HEADWISE = [(0, 3, 5, 4, 7, 2), (1, 1, 1, 1, 1, 1), (7, 3, 7, 5, 19, 7), (17, 2, 40, 33, 67, 33)]
HEADWISE += [(67, 3, 12, 8, 20, 4), (300, 2, 9, 17, 64, 4)]
SUMS = ((0, 3, 5, 4), (1, 1, 1, 1), (67, 7, 40, 37), (130, 3, 11, 150), (90, 7, 40000, 16))  # tokens, m, rows, width

# tokens of the parts, heads, group, width, extra keys, tokens of a block, window
PAGED = [((1,), 1, 1, 1, 1, 1, None), ((3, 1, 37), 2, 3, 16, 9, 32, None), ((40, 1), 3, 2, 20, 17, 5, 7)]
PAGED += [((2,), 1, 40, 7, 3, 4, 1)]


class Guarded:
    """The library, called with structures that lie in guarded memory of their own, as tensors do."""

    def __init__(self, path):
        self.library, self.called = library._open(Path(path)), set()

    def __getattr__(self, name):
        def call(structure):
            self.called.add(name)
            copy = torch.frombuffer(bytearray(structure), dtype=torch.uint8).clone()
            return getattr(self.library, name)(copy.data_ptr())

        return call


def drawn(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


def call_headwise(tokens, heads, n, half, width, k, dtype):
    query, keys = drawn(tokens, heads, 2 * half, dtype=dtype), [drawn(heads, n, half, dtype=dtype) for _ in range(2)]
    for own, transform in ((False, False), (True, False), (False, True)):
        bank = drawn(*((heads,) if own else ()), n * n, width, dtype=dtype)
        matrices = drawn(heads, width, width, dtype=dtype) if transform else None
        for residual in (None, drawn(tokens, heads, width), drawn(tokens, width, heads).bfloat16().transpose(1, 2)):
            native_lookup(LookupInputs(query, *keys, bank, matrices, residual, k), keeps=False)
        inputs = LookupInputs(query, *keys, bank, matrices, None, k)
        _, (slots, weights) = native_lookup(inputs, keeps=True)
        for gradient in (drawn(tokens, heads, width), drawn(tokens, heads, width, dtype=dtype)):
            native_score_gradients(gradient, query, *keys, slots, (bank, weights), matrices)
            native_bank_gradient(gradient, slots, weights, bank.shape)
    scores, slots = native_scores(query, *keys, k)
    native_score_gradients(None, query, *keys, slots, (query, scores))


def call_sums(tokens, m, rows, width, dtype):
    bank, vectors, weights = drawn(rows, width, dtype=dtype), drawn(tokens, width, dtype=dtype), drawn(tokens, m)
    for kind in (torch.int32, torch.int64):
        slots = torch.randint(rows, (tokens, m), dtype=kind)
        native_weighted_rows(bank, slots, weights)
        native_row_sums(vectors, slots, weights, rows)
        native_gathered_products(vectors, bank, slots)


def call_paged(parts, heads, group, width, extra, block_tokens, window, dtype):
    num_blocks, count = 3 + max(parts) // block_tokens, sum(parts)
    cache = drawn(len(parts) * num_blocks, heads, 2 * width * block_tokens, dtype=dtype)
    half = width * block_tokens
    layout = BlockLayout((block_tokens, heads, width), (0, 1, 2 * half, block_tokens), (half, width, 2 * half, 1))
    table = torch.randperm(len(cache)).int().view(len(parts), num_blocks)
    read, first = [], 0
    for request, tokens in enumerate(parts):
        keys = ExtraKeys([[drawn(heads, extra, width, dtype=dtype) for _ in range(2)] for _ in range(2)])
        reads, bias = torch.rand(tokens, extra) < 0.7, drawn(tokens, extra) if request else None
        read.append(ExtraReads(keys, reads, bias, request, first, num_blocks * block_tokens - tokens))
        first += tokens
    query = drawn(count, heads * group, width, dtype=dtype).transpose(0, 1)
    output, prepared = drawn(count, heads * group * width, dtype=dtype), PreparedReads(read, table)
    for layer in range(2):
        native_paged_attention(output, query, prepared, layer, cache, layout, 0.3, window)


def main():
    torch.set_num_threads(2)
    cases = ((call_headwise, HEADWISE), (call_sums, SUMS), (call_paged, PAGED))
    library._library = guarded = Guarded(sys.argv[1])
    for (call, sizes), dtype in itertools.product(cases, (torch.float32, torch.bfloat16)):
        for size in sizes:
            call(*size, dtype)
    assert guarded.called == set(library._FUNCTIONS)
    print("watched")


main()

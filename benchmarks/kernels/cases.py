"""Calls of kernels at many shapes, and the launches that they make."""

from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.compilation import Launch, caught_launches, specialisation
from midus_hf.ops.chapters.triton.forward import triton_segments
from midus_hf.ops.chapters.triton.gradients import triton_segment_gradients
from midus_hf.ops.depth.inputs import DepthInputs, Wanted
from midus_hf.ops.depth.triton import triton_depth_attention, triton_depth_gradients
from midus_hf.ops.gather.triton import (
    triton_bank_gradient,
    triton_row_sums,
    triton_spread_weights,
    triton_weight_gradients,
    triton_weighted_rows,
)
from midus_hf.ops.headwise.inputs import LookupInputs, room_for_gradient
from midus_hf.ops.headwise.triton import triton_output
from midus_hf.ops.product_key.triton.forward import triton_scores
from midus_hf.ops.product_key.triton.gradients import triton_gradients_of_scores, triton_score_gradients


def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield names and calls: shapes of the papers' models, wide and odd heads, large banks, each dtype.

    Names have no commas, since commas separate names on the command line.
    """
    for name, heads, dim, n, k, dtype in (
        ("llama-3.2-1b", 32, 64, 64, 4, torch.bfloat16),
        ("llama-3.1-8b", 32, 128, 64, 4, torch.bfloat16),
        ("llama-3.2-1b float32", 32, 64, 64, 4, torch.float32),
        ("llama-3.2-1b float16", 32, 64, 64, 4, torch.float16),
        ("head 16", 4, 16, 16, 1, torch.bfloat16),
        ("head 80", 4, 80, 48, 8, torch.bfloat16),
        ("head 96 with k 32", 4, 96, 64, 32, torch.bfloat16),
        ("head 256", 4, 256, 64, 4, torch.bfloat16),
        ("n 1024", 2, 64, 1024, 16, torch.bfloat16),
    ):
        yield name, partial(_lookup, heads, dim, n, k, dtype)
    yield "prompt of llama-3.2-1b", _prompt
    for dtype in (torch.bfloat16, torch.float32):
        name = f"32 heads of 4 over width 2048 in {str(dtype).removeprefix('torch.')}"
        yield name, partial(_gather, 2048, 128, dtype)
    for name, dim, memory_tokens, weighed, dtype in (
        ("chapters of llama-3.2-1b", 64, 64, "scales", torch.bfloat16),
        ("chapters of llama-3.1-8b", 128, 64, "scales", torch.bfloat16),
        ("chapters of llama-3.2-1b with logit bias", 64, 64, "biases", torch.bfloat16),
        ("chapters of llama-3.2-1b in float32", 64, 64, "", torch.float32),
        ("chapters of llama-3.2-1b in float16", 64, 64, "", torch.float16),
        ("chapters of 3 with head 80", 80, 3, "scales", torch.bfloat16),
        ("chapters of 1000 with head 256", 256, 1000, "scales", torch.bfloat16),
        ("chapters of 1000 with head 256 in float32", 256, 1000, "scales", torch.float32),
    ):
        yield name, partial(_attend, dim, memory_tokens, weighed, dtype)
    for name, group, dim, slots, softcap, dtype in (
        ("depth of moda-700m", 2, 64, 72, None, torch.bfloat16),
        ("depth of llama-3.1-8b", 4, 128, 64, None, torch.bfloat16),
        ("depth of table 2 with 32 queries per key", 32, 64, 64, None, torch.bfloat16),
        ("depth of gemma-2 with softcap", 2, 256, 52, 50.0, torch.bfloat16),
        ("depth of 5 with head 80 in float16", 7, 80, 5, None, torch.float16),
        ("depth of 300 with head 96 and 64 queries per key", 64, 96, 300, None, torch.bfloat16),
        ("depth of 512 with head 256 in float32", 3, 256, 512, None, torch.float32),
        ("depth of heads at odd places", 2, 64, 8, None, torch.bfloat16),
    ):
        yield name, partial(_depth, group, dim, slots, softcap, dtype, skipped=1 if "odd" in name else 0)


# Tokens of a lookup, as many as in benchmarks on a GPU.
TOKENS = 32768


def _sized(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor with a shape but without data, which suffices since launches are caught."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def _lookup(heads: int, dim: int, n: int, k: int, dtype: torch.dtype) -> None:
    query, keys = _sized(TOKENS, heads, dim, dtype=dtype), _sized(heads, n, dim // 2, dtype=dtype)
    bank = _sized(heads, n * n, dim, dtype=dtype) if n <= 64 else _sized(n * n, dim, dtype=dtype)
    inputs = LookupInputs(query, keys, keys, bank, query, k, 1.0)
    kept = room_for_gradient(inputs)
    output = triton_output(inputs, kept)
    triton_score_gradients(output, query, keys, keys, bank, kept, 1.0)
    triton_bank_gradient(output, *kept, bank.shape, dtype)
    scores, chosen = triton_scores(query, keys, keys, k)
    triton_gradients_of_scores(scores, query, keys, keys, chosen)


def _prompt() -> None:
    """Look up few tokens, without gradient, so that slots and weights are not kept."""
    query, keys = _sized(2048, 32, 64, dtype=torch.bfloat16), _sized(32, 64, 32, dtype=torch.bfloat16)
    bank = _sized(32, 64 * 64, 64, dtype=torch.bfloat16)
    triton_output(LookupInputs(query, keys, keys, bank, query, 4, 1.0))


def _gather(width: int, m: int, dtype: torch.dtype) -> None:
    bank, slots = _sized(4096, width, dtype=dtype), _sized(TOKENS, m, dtype=torch.int64)
    weights = _sized(TOKENS, m, dtype=dtype)
    output = triton_weighted_rows(bank, slots, weights)
    triton_weight_gradients(output, bank, slots)
    triton_spread_weights(slots, weights, len(bank), dtype)
    triton_row_sums(output, slots, weights, 4096)


def _attend(dim: int, memory_tokens: int, weighed: str, dtype: torch.dtype) -> None:
    tokens, chosen, heads, kv_heads, chapters = 2048, 8, 32, 8, 64
    query, table = (
        torch.zeros(tokens, heads, dim, dtype=dtype),
        torch.zeros(chapters, memory_tokens, kv_heads, dim, dtype=dtype),
    )
    read = torch.zeros(tokens, chosen, dtype=torch.int64)
    extra = tuple(torch.zeros(tokens, chosen) if weighed == name else None for name in ("scales", "biases"))
    reading = triton_segments(query, table, table, read, *extra)
    triton_segment_gradients(reading.output, query, table, table, extra, reading, True, True)


def _depth(group: int, dim: int, slots: int, softcap: float | None, dtype: torch.dtype, skipped: int) -> None:
    query = _heads(group * _KV_HEADS, dim, dtype, skipped)
    keys = [_heads(_KV_HEADS, dim, dtype, skipped) for _ in range(slots)]
    inputs = DepthInputs(query, keys, keys, dim**-0.5, softcap)
    reading = triton_depth_attention(inputs)
    triton_depth_gradients(inputs, reading, reading, Wanted())


# Heads of keys and values of models that read the depth.
_KV_HEADS = 8


def _heads(count: int, dim: int, dtype: torch.dtype, skipped: int) -> torch.Tensor:
    texts, tokens = 2, 16
    numbers = torch.zeros(skipped + texts * tokens * count * dim, dtype=dtype)[skipped:]
    return numbers.view(texts, tokens, count, dim).transpose(1, 2)


def launches(of_cases: Container[str]) -> list[Launch]:
    """Return every launch of some cases; launches that compile to the same code come once."""
    by_code: dict[tuple, Launch] = {}
    for case, ask in cases():
        if case not in of_cases:
            continue
        with caught_launches() as caught:
            ask()
        for launch in caught:
            key = (launch.kernel.__name__, str((specialisation(launch), launch.options)))
            by_code.setdefault(key, replace(launch, case=case))
    return list(by_code.values())

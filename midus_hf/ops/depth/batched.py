"""Attention to the depth by matrix products, a few tokens at a time."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from midus_hf.ops.depth.inputs import DepthInputs, DepthReading

# Largest number of elements in the keys of a stretch, which are copied together, so that a CPU's caches hold them.
_NUMBERS = 2**20
# Least number of tokens per stretch, however many slots there are.
_FEWEST = 16


def batched_depth_attention(inputs: DepthInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `depth_attention` with a matrix product per token and key/value head.

    Slots are copied together for one stretch of tokens at a time, so neither pass makes a tensor as large as all slots
    of all tokens.
    """
    query, keys, values, scaling, softcap = inputs
    return _Batched.apply(query, scaling, softcap, len(keys), *keys, *values)


def batched_reading(inputs: DepthInputs) -> DepthReading:
    """Compute the results of `batched_depth_attention`, without autograd."""
    query, keys, values, scaling, softcap = inputs
    wide, kv_heads = torch.promote_types(query.dtype, torch.float32), keys[0].shape[1]
    reads, sums = [], []
    for rows in _stretches(keys):
        queries = _by_token(query, rows, kv_heads).to(wide)
        scores = _scores(queries, _together(keys, rows, wide), scaling, softcap)
        lse = scores.logsumexp(-1)
        shares = (scores - lse.unsqueeze(-1)).exp()
        reads.append(_by_head(shares @ _together(values, rows, wide)).to(query.dtype))
        sums.append(_by_head(lse))
    return DepthReading(torch.cat(reads, dim=2), torch.cat(sums, dim=2))


def batched_gradients(inputs: DepthInputs, reading: DepthReading, gradient: DepthReading) -> list[torch.Tensor]:
    """Compute the gradients of query, keys and values from the results of the forward pass and the gradients of the results."""
    query, keys, values, scaling, softcap = inputs
    (read, lse), (of_read, of_lse) = reading, gradient
    wide, kv_heads = lse.dtype, keys[0].shape[1]
    # Gradient of a score: its share * (<gradient, value> - <gradient, output> + gradient of the log-sum-exp).
    mean = (of_read.to(wide) * read.to(wide)).sum(-1) - of_lse  # [B, H, T]
    of_query = []
    of_keys, of_values = ([torch.empty_like(slot) for slot in part] for part in (keys, values))
    for rows in _stretches(keys):
        queries, along = (_by_token(part, rows, kv_heads).to(wide) for part in (query, of_read))
        keys_here = _together(keys, rows, wide)
        scores = _scores(queries, keys_here, scaling, softcap)
        shares = (scores - _by_token(lse, rows, kv_heads).unsqueeze(-1)).exp()  # [B, t, K, G, n]
        added = along @ _together(values, rows, wide).transpose(-1, -2)
        of_scores = shares * (added - _by_token(mean, rows, kv_heads).unsqueeze(-1)) * scaling
        if softcap is not None:
            of_scores = of_scores * (1 - (scores / softcap).square())
        of_query.append(_by_head(of_scores @ keys_here))
        for into, of_slots in (
            (of_keys, of_scores.transpose(-1, -2) @ queries),
            (of_values, shares.transpose(-1, -2) @ along),
        ):
            for slot, of_slot in zip(into, of_slots.unbind(-2), strict=True):
                slot[:, :, rows] = of_slot.transpose(1, 2)
    return [torch.cat(of_query, dim=2).to(query.dtype), *of_keys, *of_values]


def _stretches(keys: Sequence[torch.Tensor]) -> Iterator[slice]:
    batch, kv_heads, tokens, width = keys[0].shape
    step = max(_FEWEST, _NUMBERS // max(1, batch * kv_heads * width * len(keys)))
    for start in range(0, max(1, tokens), step):  # no tokens give one empty stretch
        yield slice(start, min(start + step, tokens))


def _by_token(heads: torch.Tensor, rows: slice, kv_heads: int) -> torch.Tensor:
    """Return a stretch of `[B, H, T, ...]` as `[B, t, K, H / K, ...]`."""
    return heads[:, :, rows].transpose(1, 2).unflatten(2, (kv_heads, -1))


def _by_head(tokens: torch.Tensor) -> torch.Tensor:
    """Return `[B, t, K, G, ...]` as `[B, H, t, ...]`."""
    return tokens.flatten(2, 3).transpose(1, 2)


def _together(slots: Sequence[torch.Tensor], rows: slice, dtype: torch.dtype) -> torch.Tensor:
    """Stack the slots of a stretch to `[B, t, K, n, d]`."""
    return torch.stack([slot[:, :, rows].transpose(1, 2) for slot in slots], dim=-2).to(dtype)


def _scores(query: torch.Tensor, keys: torch.Tensor, scaling: float, softcap: float | None) -> torch.Tensor:
    """Return the scores of each slot, `[B, t, K, G, n]`."""
    scores = (query @ keys.transpose(-1, -2)) * scaling
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


class _Batched(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, scaling: float, softcap: float | None, count: int, *slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        read, lse = batched_reading(DepthInputs(query, slots[:count], slots[count:], scaling, softcap))
        ctx.save_for_backward(query, read, lse, *slots)
        ctx.scaling, ctx.softcap, ctx.count = scaling, softcap, count
        return read, lse

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, read, lse, *slots = ctx.saved_tensors
        inputs = DepthInputs(query, slots[: ctx.count], slots[ctx.count :], ctx.scaling, ctx.softcap)
        of_query, *of_slots = batched_gradients(inputs, DepthReading(read, lse), DepthReading(*gradients))
        return of_query, None, None, None, *of_slots

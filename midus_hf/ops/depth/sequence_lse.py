"""The logarithm of the divisor of a softmax over the sequence, for calls whose attention kernel does not return it."""

from typing import Any

import torch

# Queries whose scores are held at once.
_CHUNK = 256


def sequence_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scaling: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """Return the logarithm of the sum of the exponentials of each query's scores.

    Scores are computed for a few queries at a time, and again for the gradient, so that no tensor holds all scores.
    With inputs of half precision, products are summed, capped and masked in float32 and never rounded to half
    precision, as in the attention kernels whose output is combined with this sum.

    Args:
        query: `[B, H, T, d]`, floating point.
        key: `[B, K, S, d]`; K divides H.
        mask: Broadcastable to `[B, H, T, S]`: boolean, true for keys that a query reads, or added to scores; None to
            read every key.
        is_causal: Whether query t reads only keys up to t.
        scaling: Factor of scores.
        softcap: Bound c of scores in `c * tanh(score / c)`. Default: None, no bound.

    Returns:
        `[B, H, T]`, float32 at least; minus infinity for queries that read nothing.
    """
    return _SequenceLse.apply(query, key, mask, is_causal, scaling, softcap)


def sequence_weights(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scaling: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """Return the attention weights of the softmax over the sequence alone, with the arguments of `sequence_lse`.

    All weights are computed at once, for inspection.

    Returns:
        `[B, H, T, S]`, float32 at least; zero for queries that read nothing. No gradient flows through the weights.
    """
    with torch.no_grad():
        rows = slice(0, query.shape[2])
        scores = _scores(query, _factor(key), mask, is_causal, scaling, softcap, rows)[0].flatten(1, 2)
        return scores.softmax(-1).nan_to_num()


def _factor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in the dtype in which `_product` multiplies it: half precision is widened to float32, except on CUDA."""
    if tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16) and torch.version.hip is None:
        return tensor  # CUDA's matrix product of half precision can return float32
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the product of matrices `[B, K, m, n]` and `[B, K, n, p]`, both from `_factor`, in float32 at least."""
    if left.dtype in (torch.bfloat16, torch.float16):
        return torch.bmm(left.flatten(0, 1), right.flatten(0, 1), out_dtype=torch.float32).unflatten(0, left.shape[:2])
    return left @ right


def _chunks(tokens: int) -> list[slice]:
    return [slice(start, min(start + _CHUNK, tokens)) for start in range(0, tokens, _CHUNK)]


def _scores(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scaling: float,
    softcap: float | None,
    rows: slice,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores `[B, K, G, t, S]` of some queries twice: capped and masked, and capped only.

    The key comes from `_factor`, so that it is widened once for all rows.
    """
    heads, kv_heads = query.shape[1], key.shape[1]
    few = query[:, :, rows]
    grouped = few.unflatten(1, (kv_heads, heads // kv_heads)).flatten(2, 3)  # [B, K, G * t, d]
    scores = _product(_factor(grouped), key.transpose(-1, -2)) * scaling
    scores = scores.unflatten(2, (heads // kv_heads, few.shape[2]))
    capped = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    masked = capped
    if is_causal:
        positions = torch.arange(rows.start, rows.stop, device=query.device)
        ahead = torch.arange(key.shape[2], device=query.device) > positions[:, None]
        masked = masked.masked_fill(ahead, float("-inf"))
    if mask is not None:
        mask = mask if mask.shape[2] == 1 else mask[:, :, rows]
        mask = mask.expand(-1, heads, -1, -1) if mask.shape[1] not in (1, heads) else mask
        of_heads = mask.unsqueeze(2) if mask.shape[1] == 1 else mask.unflatten(1, (kv_heads, heads // kv_heads))
        masked = masked.masked_fill(~of_heads, float("-inf")) if mask.dtype == torch.bool else masked + of_heads
    return masked, capped


class _SequenceLse(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
        scaling: float,
        softcap: float | None,
    ) -> torch.Tensor:
        factor = _factor(key)
        parts = [
            _scores(query, factor, mask, is_causal, scaling, softcap, rows)[0].logsumexp(-1).flatten(1, 2)
            for rows in _chunks(query.shape[2])
        ]
        lse = torch.cat(parts, dim=2)  # [B, H, T]
        ctx.save_for_backward(query, key, mask, lse)
        ctx.options = (is_causal, scaling, softcap)
        return lse

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (of_lse,) = gradients
        query, key, mask, lse = ctx.saved_tensors
        is_causal, scaling, softcap = ctx.options
        kv_heads = key.shape[1]
        factor = _factor(key)
        of_query, of_key = [], torch.zeros_like(key, dtype=lse.dtype)
        for rows in _chunks(query.shape[2]):
            masked, capped = _scores(query, factor, mask, is_causal, scaling, softcap, rows)
            sums, of_sums = (part[:, :, rows].unflatten(1, (kv_heads, -1)).unsqueeze(-1) for part in (lse, of_lse))
            of_scores = (masked - sums).exp() * of_sums  # [B, K, G, t, S]
            of_scores = torch.where(sums == float("-inf"), torch.zeros_like(of_scores), of_scores)
            if softcap is not None:
                of_scores = of_scores * (1 - (capped / softcap).square())
            of_scores = (of_scores * scaling).flatten(2, 3).to(factor.dtype)  # [B, K, G * t, S]
            few = query[:, :, rows].unflatten(1, (kv_heads, -1))
            of_query.append(_product(of_scores, factor).view_as(few).flatten(1, 2).to(query.dtype))
            of_key = of_key + _product(of_scores.transpose(-1, -2), _factor(few.flatten(2, 3)))
        return torch.cat(of_query, dim=2), of_key.to(key.dtype), None, None, None, None

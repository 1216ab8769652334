"""Attention of tokens to slots of their position, joined with attention to the sequence (MoDA)."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from midus_hf.ops.dispatch.calling import differentiable_op, resolve
from midus_hf.ops.moda import reference
from midus_hf.ops.moda.reference import depth_scores, join_factors
from midus_hf.ops.moda.triton import depth_refusal, triton_depth_attention, triton_depth_gradients

_CHUNK = 256  # queries whose scores of the sequence are held at once


def depth_attention(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    scaling: float,
    softcap: float | None = None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attend from each token to the n slots of the token's position, in one softmax.

    Kernels read slots in place, and copy them only if dtypes differ or rows are not contiguous. PyTorch copies all slots together,
    and again in the backward pass. Query head h reads key/value head h // (H / K).

    Args:
        query: `[B, H, T, d]`, floating point.
        keys: Key of each of n slots, `[B, K, T, d]`; n is 1 or more, and K divides H.
        values: Value of each slot, `[B, K, T, d]`.
        scaling: Factor of scores.
        softcap: Bound c of scores in `c * tanh(score / c)`. Default: None, no bound.
        backend: Body to run, as in `OpChoices`: `"torch"` is `"reference"` with intermediate results recomputed for the gradient.
            Default: `"auto"`.

    Returns:
        What each head reads, `[B, H, T, d]`, in the dtype of `query`, and the logarithm of the sum of the exponentials of its scores,
        `[B, H, T]`, float32 at least. Gradients flow through both.

    Raises:
        ValueError: If there are no slots, shapes disagree, or `backend` names kernels for a call that they cannot run.
    """
    if not keys or len(keys) != len(values):
        raise ValueError(f"there are {len(keys)} keys and {len(values)} values; expected as many, and one or more.")
    for slot in (*keys, *values):
        batch, heads, tokens, width = query.shape
        fits = slot.dim() == 4 and (slot.shape[0], *slot.shape[2:]) == (batch, tokens, width)
        if not fits or heads % slot.shape[1] or slot.shape != keys[0].shape:
            raise ValueError(
                f"query is {tuple(query.shape)} and a slot {tuple(slot.shape)}; expected [batch, heads, tokens, width], and "
                "as many heads or a divisor of them."
            )
    dtype = shared_dtype(query, *keys, *values)
    body = resolve(backend, query.to(dtype), depth_refusal(query, keys))
    if body == "triton":
        keys, values = ([slot.to(dtype) for slot in slots] for slots in (keys, values))
        read, lse = depth_attention_op(query.to(dtype), keys, values, scaling, softcap)
        return read.to(query.dtype), lse
    if body == "reference":
        return reference.depth_attention(query, keys, values, scaling, softcap)
    return _computed_again(reference.depth_attention, query, keys, values, scaling, softcap)


def sequence_lse(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scaling: float, softcap: float | None = None
) -> Tensor:
    """Compute `reference.sequence_lse` for a few queries at a time, so that no tensor holds all scores.

    Scores of half precision are summed, capped and masked in float32, as in the attention kernels whose output this is combined with.
    """
    key = key.to(torch.promote_types(query.dtype, torch.float32))
    parts = []
    for start in range(0, query.shape[2], _CHUNK):
        rows = slice(start, start + _CHUNK)
        mask_of_rows = mask if mask is None or mask.shape[2] == 1 else mask[:, :, rows]
        arguments = (query[:, :, rows], key, mask_of_rows, is_causal, scaling, softcap, start)
        parts.append(_computed_again(reference.sequence_lse, *arguments))
    return torch.cat(parts, dim=2)  # [B, H, T]


def _computed_again(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function whose intermediate results are not kept for the gradient, but recomputed."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def joint_shares(
    query: Tensor,
    keys: Sequence[Tensor],
    sequence_lse: Tensor,
    scaling: float,
    softcap: float | None = None,
    gate: Tensor | None = None,
    added: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the factors of slots' values and of the sequence's output in `joint_attention`, detached.

    Arguments are those of `depth_attention` and `joint_attention`. The shares of slots `[B, H, T, n]` and of the sequence `[B, H,
    T]`, float32 at least, add up to 1, or to 2 - c if `added`.
    """
    with torch.no_grad():
        scores = depth_scores(query, keys, scaling, softcap)
        sequence_factor, depth_factor = join_factors(sequence_lse, scores.logsumexp(-1), gate, added)
        return scores.softmax(-1) * depth_factor.unsqueeze(-1), sequence_factor


def shared_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype in which kernels read tensors: autocast's if theirs differ, else the promoted one."""
    dtypes = {tensor.dtype for tensor in tensors}
    device = tensors[0].device.type
    if len(dtypes) > 1 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return functools.reduce(torch.promote_types, dtypes)


def _empty_by_token(heads: Tensor) -> Tensor:
    """Return an uninitialised tensor `[B, H, T, d]`, in memory as `[B, T, H, d]`, as kernels write."""
    return heads.new_empty(heads.transpose(1, 2).shape).transpose(1, 2)


def _shapes(query, keys, values, scaling, softcap):  # type: ignore[no-untyped-def]
    output = _empty_by_token(query)
    return output, output.new_empty(output.transpose(1, 2).shape[:3], dtype=torch.float32).transpose(1, 2)


depth_attention_op = differentiable_op(
    "depth_attention",
    triton_depth_attention,
    triton_depth_gradients,
    _shapes,
    gradients=("query", "keys", "values"),
    outputs=("output", "lse"),
    like=_empty_by_token,
)

"""Attention of tokens to slots of their position, joined with attention to the sequence (MoDA)."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from midus_hf.ops.dispatch.calling import differentiable_op, resolve, without_autocast
from midus_hf.ops.moda.triton import depth_refusal, triton_depth_attention, triton_depth_gradients

_CHUNK = 256  # queries whose scores of the sequence are held at once


def reference_depth_attention(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scaling: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attend from each token to the n slots of the token's position, in one softmax.

    Shapes: query `[B, H, T, d]`, key and value of each slot `[B, K, T, d]`; K divides H. Scores are multiplied with `scaling`, and
    bounded by c in `c * tanh(score / c)` if there is a `softcap` c. Returns what heads read, `[B, H, T, d]`, in the query's dtype,
    and the logarithm of the sum of the exponentials of scores, `[B, H, T]`, float32 at least.
    """
    scores = depth_scores(query, keys, scaling, softcap)
    shares = scores.softmax(-1).unflatten(1, (keys[0].shape[1], -1))  # [B, K, G, T, n]
    stacked = torch.stack([value.to(scores.dtype) for value in values], dim=3)  # [B, K, T, n, d]
    with without_autocast(query.device.type):
        read = torch.einsum("bkgtn,bktnd->bkgtd", shares, stacked).flatten(1, 2)
    return read.to(query.dtype), scores.logsumexp(-1)


def depth_scores(query: Tensor, keys: Sequence[Tensor], scaling: float, softcap: float | None) -> Tensor:
    """Return the score of each slot, `[B, H, T, n]`, float32 at least; arguments as in `depth_attention`."""
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = query.to(wide).unflatten(1, (keys[0].shape[1], -1))  # [B, K, G, T, d]
    stacked = torch.stack([key.to(wide) for key in keys], dim=3)  # [B, K, T, n, d]
    with without_autocast(query.device.type):
        scores = torch.einsum("bkgtd,bktnd->bkgtn", grouped, stacked) * scaling
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    return scores.flatten(1, 2)


def reference_sequence_lse(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scaling: float,
    softcap: float | None = None,
    first: int = 0,
) -> Tensor:
    """Return the log-sum-exp of each query's scores of the sequence, `[B, H, T]`, float32 at least.

    It is minus infinity for queries that read nothing.

    Args:
        query: `[B, H, T, d]`, floating point.
        key: `[B, K, S, d]`; K divides H.
        mask: Broadcastable to `[B, H, T, S]`: boolean, true for keys that a query reads, or added to scores; or None.
        is_causal: Whether query t reads only keys up to `first + t`.
        scaling: Factor of scores.
        softcap: Bound c of scores in `c * tanh(score / c)`. Default: None, no bound.
        first: Position of the first query. Default: 0.
    """
    scores = sequence_scores(query, key, mask, is_causal, scaling, softcap, first)
    is_empty = (scores == float("-inf")).all(-1)
    # The gradient of a sum over nothing would be NaN.
    return scores.masked_fill(is_empty.unsqueeze(-1), 0).logsumexp(-1).masked_fill(is_empty, float("-inf"))


def sequence_scores(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scaling: float,
    softcap: float | None,
    first: int = 0,
) -> Tensor:
    """Return the masked scores, `[B, H, T, S]`, float32 at least; arguments as in `sequence_lse`."""
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = query.to(wide).unflatten(1, (key.shape[1], -1)).flatten(2, 3)  # [B, K, G * T, d]
    with without_autocast(query.device.type):
        scores = grouped @ key.to(wide).transpose(-1, -2) * scaling  # [B, K, G * T, S]
    scores = scores.unflatten(2, (-1, query.shape[2])).flatten(1, 2)  # [B, H, T, S]
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    if is_causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1 + first)
        scores = scores.masked_fill(ahead, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return scores


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
        return reference_depth_attention(query, keys, values, scaling, softcap)
    return _computed_again(reference_depth_attention, query, keys, values, scaling, softcap)


def sequence_lse(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scaling: float, softcap: float | None = None
) -> Tensor:
    """Compute `reference_sequence_lse` for a few queries at a time, so that no tensor holds all scores.

    Scores of half precision are summed, capped and masked in float32, as in the attention kernels whose output this is combined with.
    """
    key = key.to(torch.promote_types(query.dtype, torch.float32))
    parts = []
    for start in range(0, query.shape[2], _CHUNK):
        rows = slice(start, start + _CHUNK)
        mask_of_rows = mask if mask is None or mask.shape[2] == 1 else mask[:, :, rows]
        arguments = (query[:, :, rows], key, mask_of_rows, is_causal, scaling, softcap, start)
        parts.append(_computed_again(reference_sequence_lse, *arguments))
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

# Limit of exponents of e, so that powers stay within float32. At this limit, a row reads only the depth.
_LARGEST_EXPONENT = 80.0


def joint_attention(
    sequence: Tensor,
    sequence_lse: Tensor,
    depth: Tensor,
    depth_lse: Tensor,
    gate: Tensor | None = None,
    added: bool = False,
) -> Tensor:
    """Join what heads read of the sequence, o_S, with what they read of the depth, o_D (section 2.3).

    With S and D the two sums of exponentials, `w = D / (S + D)` is the share of the depth in one softmax over both. A gate c leads
    from only the sequence to this softmax: `(1 - c w) o_S + c w o_D`, or, if `added`, `(1 - c w) o_S + (1 - c + c w) o_D`. At c = 0,
    the first formula gives o_S, bit for bit, and the second `o_S + o_D`. At c = 1, the default, both give the paper's softmax over
    both.

    Shapes: o_S, o_D and the result, in the dtype of o_S, `[B, H, T, d]`; logarithms of S and D `[B, H, T]`, and the gate c, from 0 to
    1, broadcastable to it.
    """
    sequence_factor, depth_factor = join_factors(sequence_lse, depth_lse, gate, added)
    wide = torch.promote_types(sequence.dtype, torch.float32)
    sequence_factor, depth_factor = (part.unsqueeze(-1).to(wide) for part in (sequence_factor, depth_factor))
    return (sequence_factor * sequence.to(wide) + depth_factor * depth.to(wide)).to(sequence.dtype)


def join_factors(sequence_lse: Tensor, depth_lse: Tensor, gate: Tensor | None, added: bool) -> tuple[Tensor, Tensor]:
    """Return the factors of o_S and o_D in `joint_attention`, `[B, H, T]`; arguments as there."""
    share, rest = shares_of_both(sequence_lse, depth_lse)
    if gate is None:
        return rest, share
    gate = gate.to(share.dtype)
    depth_factor = gate * share
    return (1 - gate) + gate * rest, (1 - gate) + depth_factor if added else depth_factor


def shares_of_both(sequence_lse: Tensor, depth_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the shares of depth and sequence in one softmax over both: w and 1 - w, `[B, H, T]`.

    The logarithms `[B, H, T]` are minus infinity for rows that read nothing; w is 0 for rows that read no slot of the depth.
    """
    # If both parts are empty, the difference, and all gradients through it, would be NaN.
    sequence_lse = sequence_lse.masked_fill(depth_lse == float("-inf"), 0)
    ratio = (depth_lse - sequence_lse).clamp(max=_LARGEST_EXPONENT).exp()
    return ratio / (1 + ratio), 1 / (1 + ratio)


def sequence_weights(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scaling: float, softcap: float | None = None
) -> Tensor:
    """Return the softmax over only the sequence, `[B, H, T, S]`; arguments as in `sequence_lse`.

    They are float32 at least, zero for queries that read nothing, and without gradient.
    """
    with torch.no_grad():
        return sequence_scores(query, key, mask, is_causal, scaling, softcap).softmax(-1).nan_to_num()

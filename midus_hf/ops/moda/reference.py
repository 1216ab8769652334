"""Attention to slots of the depth, joined with attention to the sequence (MoDA, section 2.3)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from midus_hf.ops.dispatch.calling import without_autocast

# Limit of exponents of e, so that powers stay within float32. At this limit, a row reads only the depth.
_LARGEST_EXPONENT = 80.0


def depth_attention(
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


def sequence_lse(
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


def sequence_weights(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scaling: float, softcap: float | None = None
) -> Tensor:
    """Return the softmax over only the sequence, `[B, H, T, S]`; arguments as in `sequence_lse`.

    They are float32 at least, zero for queries that read nothing, and without gradient.
    """
    with torch.no_grad():
        return sequence_scores(query, key, mask, is_causal, scaling, softcap).softmax(-1).nan_to_num()


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

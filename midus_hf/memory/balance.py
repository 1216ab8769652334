"""A loss that is small when a memory's queries spread over all of its keys."""

import torch
from torch.utils.checkpoint import checkpoint

from midus_hf.memory.protocols import ScoresSubKeys

_MOST_SCORES = 1 << 24
"""Scores held at a time: 64 MB in float32."""


def balance_loss(memory: ScoresSubKeys, attention_output: torch.Tensor) -> torch.Tensor:
    """How unevenly the tokens of a batch select sub-keys: Switch Transformer's loss (Fedus et al. 2021, equation 4).

    For every head and side, `n * sum_i f_i P_i`: `f_i` is the share of the tokens' selections of their k best sub-keys
    that fall on sub-key `i`, a constant; `P_i` is the mean over tokens of the softmax of the side's scores over the
    temperature. The result is the mean over heads and sides. It is 1 if selections or probabilities are uniform, and
    up to `n / k` if all tokens select the same. A memory with one key per slot has one side, its N slots.

    The scores of all sub-keys exist a stretch of tokens at a time, and again in the backward pass.

    Args:
        memory: Whose keys are selected. What its batch norm has learned stays as it is.
        attention_output: `[B, T, W]`, what the memory reads; every token counts, so padding should have none.

    Returns:
        A scalar, float32 (float64 for a float64 memory), differentiable in the keys and in `attention_output`.
    """
    query = memory.queries(attention_output, track_statistics=False).flatten(0, -3)  # [S, H, query_width]
    tokens, heads, _ = query.shape
    sub_keys = sum(scores.shape[-1] for scores in memory.sub_key_scores(query[:0]))
    stretch = max(1, _MOST_SCORES // (heads * sub_keys))
    totals: list[tuple[torch.Tensor, torch.Tensor]] | None = None
    for part in query.split(stretch):
        sums = checkpoint(_side_sums, memory, part, use_reentrant=False, preserve_rng_state=False)
        totals = sums if totals is None else [(p + q, f + g) for (p, f), (q, g) in zip(totals, sums, strict=True)]
    assert totals is not None
    losses = [
        probabilities.shape[-1] * ((selections / (tokens * memory.k)) * (probabilities / tokens)).sum(-1).mean()
        for probabilities, selections in totals
    ]
    return torch.stack(losses).mean()


def _side_sums(memory: ScoresSubKeys, query: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each side, sums over the tokens of `query` `[S, H, query_width]`: of probabilities `[H, n]`, and how often
    each sub-key is among a token's k best `[H, n]`."""
    sums = []
    for scores in memory.sub_key_scores(query):  # [S, H, n]
        probabilities = memory.weigh(scores).sum(0)
        with torch.no_grad():
            chosen = scores.topk(memory.k, dim=-1).indices.transpose(0, 1).flatten(1)  # [H, S * k]
            ones = scores.new_ones(()).expand_as(chosen)
            sums.append((probabilities, torch.zeros_like(probabilities).scatter_add_(1, chosen, ones)))
    return sums

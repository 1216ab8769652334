"""Losses on keys and cores of Tucker-decomposed retrieval (UltraMemV2, appendix E.4)."""

import torch


def key_balance(logits: torch.Tensor, side: int) -> torch.Tensor:
    """How unevenly keys are chosen, `n * sum_n f_n p_n`, the mean over sets of keys; `side` where all are chosen alike (equation 25).

    Args:
        logits: `[S, G, n]`, leading scores of the n keys of G sets for S tokens, floating point.
        side: Keys of a set that each token chooses.

    Returns:
        A scalar, in the dtype of `logits`.
    """
    tokens, _, n = logits.shape
    probabilities = logits.softmax(-1).mean(0)  # [G, n]
    chosen = logits.topk(side, dim=-1).indices  # [S, G, side]
    counts = torch.zeros_like(probabilities).scatter_add_(
        -1, chosen.transpose(0, 1).flatten(1), torch.ones_like(logits[..., :side]).transpose(0, 1).flatten(1)
    )
    return n * (counts / tokens * probabilities).sum(-1).mean()


def core_penalty(core: torch.Tensor, margin: float) -> torch.Tensor:
    """How far the smaller singular values of cores lie above a margin: the mean of `max(0, value - margin)^2` (equation 23).

    Args:
        core: `[..., r, r]`.
        margin: tau.

    Returns:
        A scalar, float32 at least; zero for rank 1.
    """
    wide = core.to(torch.promote_types(core.dtype, torch.float32))
    smaller = torch.linalg.svdvals(wide)[..., 1:]
    return (smaller - margin).clamp_min(0).square().mean() if smaller.numel() else wide.sum() * 0

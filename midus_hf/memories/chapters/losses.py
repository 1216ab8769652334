"""Losses of a router of chapters."""

import torch


def balance_loss(logits: torch.Tensor, chosen: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return Switch Transformer's load-balance loss over the chapters (Fedus et al. 2021, equation 4).

    The loss is `C * sum_i f_i P_i`: `f_i` is the share of tokens for which chapter i is among the k chosen, a constant; `P_i` is
    chapter i's mean probability. An even choice gives k, since the `f_i` add up to k.

    Every one of the C chapters must be choosable. If `logits` had a chapter that is never chosen, moving all probability to this
    chapter would take the loss to 0, whatever the router chooses.

    Args:
        logits: `[S, C]`, for each stretch of tokens that is routed as one, over the chapters that can be chosen.
        chosen: `[S, k]`, int64, the chapters that each stretch reads.
        counts: `[S]`, number of tokens in each stretch, without padding.

    Returns:
        A scalar, float32 at least.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    shares = (counts / counts.sum().clamp(min=1)).to(wide)  # [S]
    probabilities = (logits.to(wide).softmax(-1) * shares.unsqueeze(-1)).sum(0)  # [C]
    chosen_shares = shares.unsqueeze(-1).expand(chosen.shape)
    frequencies = torch.zeros_like(probabilities).scatter_add(0, chosen.flatten(), chosen_shares.flatten())
    return logits.shape[-1] * (frequencies * probabilities).sum()


def z_loss(logits: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the mean over tokens of the squared log-sum-exp of router logits (ST-MoE, Zoph et al. 2022, equation 5).

    Args:
        logits: `[S, C]`, for each stretch of tokens that is routed as one.
        counts: `[S]`, number of tokens in each stretch, without padding.

    Returns:
        A scalar, float32 at least.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    squares = logits.to(wide).logsumexp(-1).square()
    return (squares * counts).sum() / counts.sum().clamp(min=1)

"""Directions that say nothing of a text, in the place of queries: what memories retrieve by where their addressing is random."""

import torch


def random_directions(vectors: torch.Tensor) -> torch.Tensor:
    """Vectors of random direction, each as long as the one whose place it takes; no gradient goes back to these.

    They are drawn from torch's generator of the device, whose state activation checkpointing restores, so that a layer that
    is computed twice reads the same slots. The same seed gives the same directions.

    Args:
        vectors: `[..., d]`, of any floating dtype.

    Returns:
        `[..., d]`, of the same dtype.
    """
    wide = vectors.detach().to(torch.promote_types(vectors.dtype, torch.float32))
    drawn = torch.randn_like(wide)
    tiny = torch.finfo(wide.dtype).tiny
    lengths = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)  # [..., 1]
    drawn_lengths = torch.linalg.vector_norm(drawn, dim=-1, keepdim=True).clamp_min(tiny)  # [..., 1]
    return (drawn * (lengths / drawn_lengths)).to(vectors.dtype)

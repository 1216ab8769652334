"""Rotary position embeddings of queries and keys, applied and removed."""

import torch

# Cosines and sines of a pass, both `[B, T, d]`, the argument `position_embeddings` of layers.
Rotation = tuple[torch.Tensor, torch.Tensor]


def rotated(heads: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
    """Rotate queries or keys `[B, H, T, d]` as the families do."""
    assert rotation is not None, "layers are called with position_embeddings"
    cos, sin = (part.unsqueeze(1).to(heads.dtype) for part in rotation)  # [B, 1, T, d]
    return heads * cos + _turned(heads) * sin


def unrotated(heads: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
    """Undo the rotation of queries or keys `[B, H, T, d]`, and their lengthening by scaled rotary embeddings."""
    assert rotation is not None, "layers are called with position_embeddings"
    cos, sin = (
        part.unsqueeze(1).to(torch.promote_types(heads.dtype, torch.float32)) for part in rotation
    )  # [B, 1, T, d]
    wide = heads.to(cos.dtype)
    return ((wide * cos - _turned(wide) * sin) / (cos.square() + sin.square())).to(heads.dtype)


def _turned(heads: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)

"""Rotary position embeddings of queries and keys, applied and removed by the family's own function."""

import sys
from typing import Any

import torch

# Cosines and sines of a pass, the argument `position_embeddings` of layers.
Rotation = tuple[torch.Tensor, torch.Tensor]


def rotated(attention: Any, heads: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
    """Rotate queries or keys `[B, H, T, d]` as a family's attention does, if it does and there is a rotation."""
    if rotation is None or not attention.rotates:
        return heads
    rotate: Any = sys.modules[attention.family_class.__module__].apply_rotary_pos_emb
    if rotate.__code__.co_varnames[1] == "cos":  # the function takes queries or keys (Gemma 4)
        return rotate(heads, *rotation)
    return rotate(heads, heads[:, :0], *rotation)[0]  # the function takes queries and keys


def unrotated(attention: Any, heads: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
    """Undo the rotation of queries or keys `[B, H, T, d]`, and their lengthening by scaled rotary embeddings.

    Raises:
        ValueError: If the family rotates by complex numbers, as Llama 4 does.
    """
    if rotation is None or not attention.rotates:
        return heads
    if not isinstance(rotation, tuple):
        raise ValueError(
            f"{attention.family_class.__name__} rotates queries and keys by complex numbers; expected cosines and sines. Choose a "
            "memory that does not read rotated heads."
        )
    cos, sin = (part.to(torch.promote_types(heads.dtype, torch.float32)) for part in rotation)
    squared = cos.square() + sin.square()
    return rotated(attention, heads.to(cos.dtype), (cos / squared, -sin / squared)).to(heads.dtype)

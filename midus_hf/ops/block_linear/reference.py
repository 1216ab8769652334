"""Contract of the product of each row with the row's block: plain PyTorch."""

import torch
from torch import Tensor


def block_linear(inputs: Tensor, weights: Tensor, blocks: Tensor) -> Tensor:
    """Multiply rows by their blocks: inputs `[B, T, i]`, weights `[U, o, i]`, blocks `[B]`, result `[B, T, o]`, the inputs' dtype."""
    return torch.einsum("bti,boi->bto", inputs, weights.to(inputs.dtype)[blocks])

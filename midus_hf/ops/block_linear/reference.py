"""Contract of the product of each row with the row's block: plain PyTorch."""

import torch
from torch import Tensor


def block_linear(inputs: Tensor, weights: Tensor, blocks: Tensor) -> Tensor:
    """Multiply rows `[B, T, i]` by `weights` `[U, o, i]` of their `blocks` `[B]`: `[B, T, o]`."""
    return torch.einsum("bti,boi->bto", inputs, weights.to(inputs.dtype)[blocks])

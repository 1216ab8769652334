"""Contract of the product of each row with the row's block: plain PyTorch."""

import torch
from torch import Tensor


def block_linear(inputs: Tensor, weights: Tensor, blocks: Tensor) -> Tensor:
    """Multiply each row by the row's block, `out[b, t] = weights[blocks[b]] @ inputs[b, t]`.

    Shapes: inputs `[B, T, i]`, weights `[U, o, i]`, blocks `[B]`; the result `[B, T, o]` has the dtype of the inputs.
    """
    return torch.einsum("bti,boi->bto", inputs, weights.to(inputs.dtype)[blocks])

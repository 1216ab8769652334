"""Contract of the product of each row with the row's block: plain PyTorch."""

import torch


def block_linear(inputs: torch.Tensor, weights: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Multiply each row by the row's block, `out[b, t] = weights[blocks[b]] @ inputs[b, t]`.

    Args:
        inputs: `[B, T, i]`, floating point.
        weights: `[U, o, i]`, the U blocks; cast to the dtype of `inputs`.
        blocks: `[B]`, int64, the block of each row, from 0 to U - 1.

    Returns:
        `[B, T, o]`, in the dtype of `inputs`.
    """
    weights = weights.to(inputs.dtype)
    return torch.einsum("bti,boi->bto", inputs, weights[blocks])

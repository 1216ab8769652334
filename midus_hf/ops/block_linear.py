"""Product of each row with its block of weights, rows of one block together."""

import torch
import torch.nn.functional as F
from torch import Tensor

from midus_hf.ops.dispatch.calling import resolve


def block_linear(inputs: Tensor, weights: Tensor, blocks: Tensor, *, backend: str = "auto") -> Tensor:
    """Multiply each row by the row's block, `out[b, t] = weights[blocks[b]] @ inputs[b, t]`: `[B, T, o]`.

    With several blocks, a CPU multiplies all rows of one block together; elsewhere, where counting rows would wait for the device,
    one batched product uses a copy of the block for each row.

    Args:
        inputs: `[B, T, i]`, floating point; its dtype is that of the result.
        weights: `[U, o, i]`, the U blocks; cast to the dtype of `inputs`.
        blocks: `[B]`, int64, the block of each row, from 0 to U - 1.
        backend: One of the choices of `OpChoices`; every backend uses matrix products. Default: `"auto"`.

    Raises:
        ValueError: If shapes disagree.
    """
    if inputs.dim() != 3 or weights.dim() != 3 or inputs.shape[-1] != weights.shape[-1]:
        raise ValueError(
            f"inputs is {tuple(inputs.shape)} and weights {tuple(weights.shape)}; expected [batch, tokens, width] and "
            "[blocks, outputs, width]."
        )
    if blocks.shape != inputs.shape[:1]:
        raise ValueError(f"blocks is {tuple(blocks.shape)}; expected one for each of the {len(inputs)} rows.")
    if resolve(backend, inputs) == "reference":
        return reference_block_linear(inputs, weights, blocks)
    weights = weights.to(inputs.dtype)
    if len(weights) == 1:
        return F.linear(inputs, weights[0])
    if inputs.device.type == "cpu" and not torch.compiler.is_compiling() and len(weights) < len(inputs):
        return block_by_block(inputs, weights, blocks)
    return torch.bmm(inputs, weights[blocks].transpose(1, 2))


def block_by_block(inputs: Tensor, weights: Tensor, blocks: Tensor) -> Tensor:
    order = blocks.argsort(stable=True)
    counts = blocks.bincount(minlength=len(weights)).tolist()
    parts = inputs[order].split(counts)
    mapped = torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights, strict=True) if len(part)])
    return mapped[order.argsort()]


def reference_block_linear(inputs: Tensor, weights: Tensor, blocks: Tensor) -> Tensor:
    """Multiply rows `[B, T, i]` by `weights` `[U, o, i]` of their `blocks` `[B]`: `[B, T, o]`."""
    return torch.einsum("bti,boi->bto", inputs, weights.to(inputs.dtype)[blocks])

"""Linear maps of which each row of a batch has its own: what it fetched."""

import torch
import torch.nn.functional as F

from midus_config.installed import INSTALLED
from midus_hf.ops.backend import resolve


def block_linear(
    inputs: torch.Tensor, weights: torch.Tensor, blocks: torch.Tensor | None, *, backend: str = "auto"
) -> torch.Tensor:
    """Map each row by the block that it has, `out[b, t] = weights[blocks[b]] @ inputs[b, t]`.

    Where all rows have one block it is one matrix product. Else rows of equal blocks are mapped together on the CPU, where the
    number of them is known at once; elsewhere by one batched product with a copy of the block of each row.

    Args:
        inputs: `[B, T, i]`, floating point.
        weights: `[U, o, i]`, the blocks that there are; cast to the dtype of `inputs`.
        blocks: `[B]`, int64, from 0 to U - 1; None where row b has block b, so that U is B.
        backend: As in `OpChoices`; matrix products on every one. Default: `"auto"`.

    Returns:
        `[B, T, o]`, in the dtype of `inputs`.

    Raises:
        ValueError: If shapes disagree.
    """
    if inputs.dim() != 3 or weights.dim() != 3 or inputs.shape[-1] != weights.shape[-1]:
        raise ValueError(
            f"inputs is {tuple(inputs.shape)} and weights {tuple(weights.shape)}; expected [batch, tokens, width] and "
            "[blocks, outputs, width]."
        )
    if blocks is None and len(weights) != len(inputs):
        raise ValueError(
            f"weights has {len(weights)} blocks and blocks is None; expected one for each of the {len(inputs)} rows."
        )
    if blocks is not None and blocks.shape != inputs.shape[:1]:
        raise ValueError(f"blocks is {tuple(blocks.shape)}; expected one for each of the {len(inputs)} rows.")
    weights = weights.to(inputs.dtype)
    if INSTALLED and resolve(backend, "auto", "auto", inputs).backend == "reference":
        return torch.einsum("bti,boi->bto", inputs, weights if blocks is None else weights[blocks])
    if len(weights) == 1:
        return F.linear(inputs, weights[0])
    if blocks is None:
        return torch.bmm(inputs, weights.transpose(1, 2))
    if inputs.device.type == "cpu" and len(weights) < len(inputs) and not torch.compiler.is_compiling():
        return grouped(inputs, weights, blocks)
    return torch.bmm(inputs, weights[blocks].transpose(1, 2))


def grouped(inputs: torch.Tensor, weights: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """As `block_linear`, with one matrix product per block."""
    order = blocks.argsort(stable=True)
    counts = blocks.bincount(minlength=len(weights)).tolist()
    parts = inputs[order].split(counts)
    mapped = torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights, strict=True) if len(part)])
    return mapped[order.argsort()]

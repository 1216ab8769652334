"""Weighted sums of table rows, several per token: the slots of a token are divided into parts, and each part has a sum."""

import torch
import torch.nn.functional as F

from midus_hf.ops.dispatch.precision import narrowest_integer
from midus_hf.ops.gather.reference import parted_gather as reference
from midus_hf.ops.gather.row_sums import rows_read, widened


def parted_gather(
    bank: torch.Tensor,
    slots: torch.Tensor,
    weights: torch.Tensor,
    parts: torch.Tensor,
    num_parts: int,
    *,
    sparse_gradient: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """Sum rows of a table by parts, `out[..., p] = sum over m with parts[..., m] == p of weights[..., m] * bank[slots[..., m]]`.

    UltraMemV2 needs this if each virtual block has its own projection (equation 9). Sums are accumulated in float32 at least, in the
    order of slots, and no tensor holds the rows of all tokens. PyTorch computes and differentiates this op on every
    device.

    Args:
        bank: `[R, v]`, floating point.
        slots: `[..., m]`, int64, `0 <= slot < R`.
        weights: `[..., m]`, floating point.
        parts: `[..., m]`, int64, `0 <= part < P`.
        num_parts: Sums per token, P.
        sparse_gradient: Whether the gradient of `bank` is a coalesced sparse tensor of the rows that were read.
            Default: false.
        backend: `"reference"` for the contract, which PyTorch differentiates. Default: `"auto"`.

    Returns:
        `[..., P, v]`, the dtype of `bank`.

    Raises:
        ValueError: If the shapes disagree.
    """
    if bank.dim() != 2:
        raise ValueError(f"bank is {tuple(bank.shape)}; expected [rows, width].")
    if not slots.shape == weights.shape == parts.shape:
        raise ValueError(
            f"slots is {tuple(slots.shape)}, weights {tuple(weights.shape)} and parts {tuple(parts.shape)}; expected equal shapes."
        )
    if backend == "reference":
        return reference(bank, slots, weights, parts, num_parts, sparse_gradient)
    if sparse_gradient and torch.is_grad_enabled():
        bank, slots = rows_read(bank, slots)
    leading, m = slots.shape[:-1], slots.shape[-1]
    rows, places = widened(bank, slots.reshape(-1, m))
    first = torch.arange(len(places), device=parts.device).unsqueeze(-1) * num_parts
    bags = (first + parts.reshape(-1, m)).flatten()  # the number of the sum that each slot belongs to
    num_bags = len(places) * num_parts
    sorted_bags, order = bags.to(narrowest_integer(num_bags)).sort(stable=True)
    starts = torch.searchsorted(sorted_bags, torch.arange(num_bags, device=bags.device, dtype=sorted_bags.dtype))
    scales = weights.flatten().to(rows.dtype)[order]
    sums = F.embedding_bag(places.flatten()[order], rows, starts, per_sample_weights=scales, mode="sum")
    return sums.to(bank.dtype).reshape(*leading, num_parts, bank.shape[-1])

"""Weighted sums of table rows, several per token: the slots of a token are divided into parts, and each part has a sum."""

from typing import Any

import torch
import torch.nn.functional as F

from midus_hf.ops.dispatch.calling import custom_op
from midus_hf.ops.dispatch.precision import narrowest_integer
from midus_hf.ops.dispatch.private_torch import products_with_bags
from midus_hf.ops.gather.reference import parted_gather as reference
from midus_hf.ops.gather.row_sums import widened


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

    UltraMemV2 needs this if each virtual block has its own projection (equation 9). Each row is read once, and no
    tensor holds the rows of all tokens. Sums are accumulated in float32 at least, in the order of slots. PyTorch
    computes this op on every device.

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
    leading, m = slots.shape[:-1], slots.shape[-1]
    arguments = (bank, slots.reshape(-1, m), weights.reshape(-1, m), parts.reshape(-1, m), num_parts)
    output = _SparsePartedGather.apply(*arguments) if sparse_gradient else parted_gather_op(*arguments)
    return output.reshape(*leading, num_parts, bank.shape[-1])


@custom_op("parted_gather")
def parted_gather_op(
    bank: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, parts: torch.Tensor, num_parts: int
) -> torch.Tensor:
    """Compute `parted_gather` of `[R, v]` and three tensors `[S, m]`, to `[S, P, v]`."""
    wide_rows, places = widened(bank, slots)
    sums = _bag_sums(wide_rows, places.flatten(), weights, _bags(parts, num_parts), len(slots) * num_parts)
    return sums.to(bank.dtype).view(len(slots), num_parts, bank.shape[1])


@parted_gather_op.register_fake
def _(bank, slots, weights, parts, num_parts):  # type: ignore[no-untyped-def]
    return bank.new_empty(slots.shape[0], num_parts, bank.shape[1])


@custom_op("parted_gather_backward")
def parted_gather_backward_op(
    gradient: torch.Tensor, bank: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, parts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gradients of bank and weights for a gradient `[S, P, v]`."""
    bags = _bags(parts, gradient.shape[1])
    into_bank = _row_sums(gradient, slots, weights, bags, len(bank)).to(bank.dtype)
    return into_bank, _weight_gradients(gradient, bank, slots, bags).to(weights.dtype)


@parted_gather_backward_op.register_fake
def _(gradient, bank, slots, weights, parts):  # type: ignore[no-untyped-def]
    return torch.empty_like(bank, memory_format=torch.contiguous_format), weights.new_empty(weights.shape)


def _save(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])


def _differentiate(ctx: Any, gradient: torch.Tensor) -> tuple:
    into_bank, into_weights = parted_gather_backward_op(gradient, *ctx.saved_tensors)
    return into_bank, None, into_weights, None, None


parted_gather_op.register_autograd(_differentiate, setup_context=_save)


class _SparsePartedGather(torch.autograd.Function):
    """Autograd function of the op with a row-sparse gradient, which a registered op cannot return."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, bank: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, parts: torch.Tensor, num_parts: int
    ) -> torch.Tensor:
        ctx.save_for_backward(bank, slots, weights, parts)
        return parted_gather_op(bank, slots, weights, parts, num_parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:  # type: ignore[override]
        bank, slots, weights, parts = ctx.saved_tensors
        bags = _bags(parts, gradient.shape[1])
        rows, places = torch.unique(slots, return_inverse=True)
        sums = _row_sums(gradient, places, weights, bags, len(rows)).to(bank.dtype)
        into_bank = torch.sparse_coo_tensor(rows[None], sums, bank.shape, is_coalesced=True, check_invariants=False)
        return into_bank, None, _weight_gradients(gradient, bank, slots, bags).to(weights.dtype), None, None


def _bags(parts: torch.Tensor, num_parts: int) -> torch.Tensor:
    """Return the number of the sum, out of `S * P`, that each slot belongs to: `[S * m]`."""
    first = torch.arange(len(parts), device=parts.device).unsqueeze(-1) * num_parts
    return (first + parts).flatten()


def _bag_sums(
    rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, bags: torch.Tensor, num_bags: int
) -> torch.Tensor:
    """Sum `weights * rows[places]` per bag, in the order of weights, to `[num_bags, v]`; weights, places and bags are `[N]`."""
    sorted_bags, order = bags.to(narrowest_integer(num_bags)).sort(stable=True)
    starts = torch.searchsorted(sorted_bags, torch.arange(num_bags, device=bags.device, dtype=sorted_bags.dtype))
    scales = weights.flatten().to(rows.dtype)[order]
    return F.embedding_bag(places[order], rows, starts, per_sample_weights=scales, mode="sum")


def _row_sums(
    gradient: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, bags: torch.Tensor, num_rows: int
) -> torch.Tensor:
    """Return the gradient of rows `[num_rows, v]` for a gradient `[S, P, v]`: each row's bag holds the sums that read the row."""
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return _bag_sums(gradient.flatten(0, 1).to(wide), bags, weights, slots.flatten(), num_rows)


def _weight_gradients(
    gradient: torch.Tensor, bank: torch.Tensor, slots: torch.Tensor, bags: torch.Tensor
) -> torch.Tensor:
    """Return the products `[S, m]` of each slot's row with the gradient of the slot's sum."""
    wide_rows, places = widened(bank, slots)
    wide = gradient.flatten(0, 1).to(wide_rows.dtype).contiguous()
    return products_with_bags(wide, wide_rows, places.flatten(), bags).view(slots.shape)

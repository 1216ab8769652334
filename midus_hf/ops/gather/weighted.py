"""Weighted sums of table rows, which every memory computes from its retrieved slots."""

from typing import Any

import torch

from midus_hf.ops.dispatch.calling import custom_op
from midus_hf.ops.dispatch.choices import resolve
from midus_hf.ops.dispatch.private_torch import can_skip_dispatcher
from midus_hf.ops.gather.reference import weighted_gather as reference
from midus_hf.ops.gather.row_sums import row_sums, rows_read, weight_gradients, weighted_rows


def weighted_gather(
    bank: torch.Tensor,
    slots: torch.Tensor,
    weights: torch.Tensor,
    *,
    sparse_gradient: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """Sum rows of a table, `out = sum_m weights[..., m] * bank[slots[..., m]]` (MIDUS, equation 14).

    Sums are accumulated in float32 at least. So are sums of gradients, since thousands of tokens may read one row.

    Args:
        bank: `[R, v]`, floating point.
        slots: `[..., m]`, int64, `0 <= slot < R`.
        weights: `[..., m]`, floating point.
        sparse_gradient: Whether the gradient of `bank` is a coalesced sparse tensor of the rows that were read: for
            tables of which a batch reads few rows. Counting the rows waits for the device. Default: false.
        backend: Body to run, as in `OpChoices`. Default: `"auto"`.

    Returns:
        `[..., v]`, the dtype of `bank`.

    Raises:
        ValueError: If the shapes disagree.
        IndexError: On a CPU, if a slot is not a row of the bank.
    """
    if bank.dim() != 2:
        raise ValueError(f"bank is {tuple(bank.shape)}; expected [rows, width].")
    if slots.shape != weights.shape:
        raise ValueError(f"slots is {tuple(slots.shape)} and weights {tuple(weights.shape)}; expected equal shapes.")
    body = resolve(backend, bank, native_refusal=None)
    if body == "reference":
        return reference(bank, slots, weights, sparse_gradient)
    if sparse_gradient and torch.is_grad_enabled():
        bank, slots = rows_read(bank, slots)
    leading, m = slots.shape[:-1], slots.shape[-1]
    tensors = (bank, slots.reshape(-1, m), weights.reshape(-1, m))
    sums = weighted_rows if can_skip_dispatcher(*tensors) else weighted_gather_op
    output = sums(*tensors, body)
    return output.reshape(*leading, bank.shape[-1])


@custom_op("weighted_gather")
def weighted_gather_op(bank: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, backend: str) -> torch.Tensor:
    """Compute `weighted_gather` of `[R, v]` with slots and weights `[S, m]`, to `[S, v]`; `backend` is a resolved name."""
    return weighted_rows(bank, slots, weights, backend)


@weighted_gather_op.register_fake
def _(bank, slots, weights, backend):  # type: ignore[no-untyped-def]
    return bank.new_empty(slots.shape[0], bank.shape[1])


@custom_op("weighted_gather_backward")
def weighted_gather_backward_op(
    gradient: torch.Tensor,
    bank: torch.Tensor,
    slots: torch.Tensor,
    weights: torch.Tensor,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gradients of bank and weights for a gradient `[S, v]`."""
    into_bank = row_sums(gradient, slots, weights, len(bank), backend).to(bank.dtype)
    return into_bank, weight_gradients(gradient, bank, slots, backend).to(weights.dtype)


@weighted_gather_backward_op.register_fake
def _(gradient, bank, slots, weights, backend):  # type: ignore[no-untyped-def]
    return torch.empty_like(bank, memory_format=torch.contiguous_format), weights.new_empty(weights.shape)


def _save(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    bank, slots, weights, ctx.backend = inputs
    ctx.save_for_backward(bank, slots, weights)


def _differentiate(ctx: Any, gradient: torch.Tensor) -> tuple:
    into_bank, into_weights = weighted_gather_backward_op(gradient, *ctx.saved_tensors, ctx.backend)
    return into_bank, None, into_weights, None


weighted_gather_op.register_autograd(_differentiate, setup_context=_save)

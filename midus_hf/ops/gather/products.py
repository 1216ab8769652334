"""Products of a vector with table rows, which memories with pre-values compute (PEER)."""

from typing import Any

import torch

from midus_hf.ops.dispatch.calling import custom_op
from midus_hf.ops.dispatch.choices import resolve
from midus_hf.ops.dispatch.private_torch import can_skip_dispatcher
from midus_hf.ops.gather.reference import gathered_products as reference
from midus_hf.ops.gather.row_sums import row_sums, rows_read, weight_gradients, weighted_rows


def gathered_products(
    vectors: torch.Tensor,
    bank: torch.Tensor,
    slots: torch.Tensor,
    *,
    sparse_gradient: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """Multiply each vector with rows of a table, `out[..., m] = <vectors, bank[slots[..., m]]>` (UltraMemV2, equation 15: `P x`).

    Fused implementations do not store the gathered rows of all vectors. Sums are
    accumulated in float32 at least.

    Args:
        vectors: `[..., v]`, floating point, cast to the dtype of `bank`.
        bank: `[R, v]`, floating point.
        slots: `[..., m]`, int64, `0 <= slot < R`.
        sparse_gradient: Whether the gradient of `bank` is a coalesced sparse tensor of the rows that were read.
            Default: false.
        backend: Body to run, as in `OpChoices`. Default: `"auto"`.

    Returns:
        `[..., m]`, float32, or float64 for a float64 bank.

    Raises:
        ValueError: If the shapes disagree.
    """
    if bank.dim() != 2 or vectors.shape[-1] != bank.shape[-1]:
        raise ValueError(
            f"vectors is {tuple(vectors.shape)} and bank {tuple(bank.shape)}; expected [..., width] and [rows, width]."
        )
    if slots.shape[:-1] != vectors.shape[:-1]:
        raise ValueError(
            f"slots is {tuple(slots.shape)}; expected slots for each of the vectors {tuple(vectors.shape[:-1])}."
        )
    body = resolve(backend, bank, native_refusal=None)
    vectors = vectors.to(bank.dtype)
    if body == "reference":
        return reference(vectors, bank, slots, sparse_gradient)
    shape, m = slots.shape, slots.shape[-1]
    if sparse_gradient and torch.is_grad_enabled():
        bank, slots = rows_read(bank, slots)
    flat_vectors, flat_slots = vectors.reshape(-1, vectors.shape[-1]), slots.reshape(-1, m)
    if can_skip_dispatcher(flat_vectors, bank, flat_slots):
        output = weight_gradients(flat_vectors, bank, flat_slots, body)
    else:
        output = gathered_products_op(flat_vectors, bank, flat_slots, body)
    return output.reshape(shape)


@custom_op("gathered_products")
def gathered_products_op(vectors: torch.Tensor, bank: torch.Tensor, slots: torch.Tensor, backend: str) -> torch.Tensor:
    """Multiply `[S, v]` with the rows `[S, m]` of `[R, v]`, to `[S, m]`; `backend` is a resolved name."""
    return weight_gradients(vectors, bank, slots, backend)


@gathered_products_op.register_fake
def _(vectors, bank, slots, backend):  # type: ignore[no-untyped-def]
    return vectors.new_empty(slots.shape, dtype=torch.promote_types(bank.dtype, torch.float32))


@custom_op("gathered_products_backward")
def gathered_products_backward_op(
    gradient: torch.Tensor,
    vectors: torch.Tensor,
    bank: torch.Tensor,
    slots: torch.Tensor,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gradients of vectors and bank for a gradient `[S, m]`."""
    into_bank = row_sums(vectors, slots, gradient, len(bank), backend).to(bank.dtype)
    return weighted_rows(bank, slots, gradient, backend).to(vectors.dtype), into_bank


@gathered_products_backward_op.register_fake
def _(gradient, vectors, bank, slots, backend):  # type: ignore[no-untyped-def]
    return torch.empty_like(vectors, memory_format=torch.contiguous_format), torch.empty_like(
        bank, memory_format=torch.contiguous_format
    )


def _save(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    vectors, bank, slots, ctx.backend = inputs
    ctx.save_for_backward(vectors, bank, slots)


def _differentiate(ctx: Any, gradient: torch.Tensor) -> tuple:
    into_vectors, into_bank = gathered_products_backward_op(gradient, *ctx.saved_tensors, ctx.backend)
    return into_vectors, into_bank, None, None


gathered_products_op.register_autograd(_differentiate, setup_context=_save)

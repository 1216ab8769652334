"""Head-wise lookup that transforms the gathered values in the same pass, as one registered op; and its gradient.

The op is for compiled C, which transforms the gathered values of a block of tokens while they are in the processor's
cache. No tensor of the size of all heads' slots is made, neither of expanded values nor of their gradients. Shapes are
as in `headwise_lookup`, with a shared bank `[N, v]` and transforms `[H, v, v]`.
"""

from typing import Any, Optional

import torch

from midus_hf.ops.dispatch.calling import custom_op
from midus_hf.ops.dispatch.native.library import native_library
from midus_hf.ops.dispatch.precision import narrowest_integer
from midus_hf.ops.gather.native import native_bank_gradient
from midus_hf.ops.gather.row_sums import weighted_rows
from midus_hf.ops.headwise.inputs import LookupInputs
from midus_hf.ops.headwise.lookup import headwise_lookup_backward_op, torch_lookup
from midus_hf.ops.headwise.native import native_lookup
from midus_hf.ops.product_key.native import native_score_gradients


@custom_op("transformed_lookup")
def transformed_lookup_op(
    query: torch.Tensor,
    row_keys: torch.Tensor,
    column_keys: torch.Tensor,
    bank: torch.Tensor,
    transform: torch.Tensor,
    residual: Optional[torch.Tensor],  # noqa: UP045 - torch.library reads this form alone
    k: int,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output `[S, H, v]`, and for the gradient the slots `[S, H, k]` and their weights `[S, H, k]`, best first."""
    inputs = LookupInputs(query, row_keys, column_keys, bank, residual, k, temperature)
    if native_library() is not None:
        return native_lookup(inputs, transform)
    gathered, slots, weights = torch_lookup(inputs._replace(residual=None))
    output = transformed(gathered, transform)
    return output if residual is None else (residual + output).to(residual.dtype), slots, weights


@transformed_lookup_op.register_fake
def _(query, row_keys, column_keys, bank, transform, residual, k, temperature):  # type: ignore[no-untyped-def]
    kept = (*query.shape[:2], k)
    return (
        (bank if residual is None else residual).new_empty(*query.shape[:2], bank.shape[-1]),
        query.new_empty(kept, dtype=narrowest_integer(row_keys.shape[1] ** 2)),
        query.new_empty(kept, dtype=torch.float32),
    )


def transformed(gathered: torch.Tensor, transform: torch.Tensor) -> torch.Tensor:
    """Apply `W_h` to the gathered sum of each head h, `[..., H, v]`."""
    by_head = gathered.flatten(0, -3).transpose(0, 1)  # [H, S, v]
    return torch.matmul(by_head, transform.transpose(1, 2)).transpose(0, 1).reshape(gathered.shape)


@custom_op("transformed_lookup_backward")
def transformed_lookup_backward_op(
    gradient: torch.Tensor,
    query: torch.Tensor,
    row_keys: torch.Tensor,
    column_keys: torch.Tensor,
    bank: torch.Tensor,
    transform: torch.Tensor,
    slots: torch.Tensor,
    weights: torch.Tensor,
    temperature: float,
    wants_bank: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return gradients of query, row keys, column keys, bank and transforms, for a gradient `[S, H, v]` of the output.

    The gradient of the bank is an empty tensor if `wants_bank` is false.
    """
    if native_library() is None:
        passed = transformed(gradient.to(transform.dtype), transform.transpose(1, 2))
        tensors = (passed, query, row_keys, column_keys, bank, slots, weights)
        *lookups, into_bank = headwise_lookup_backward_op(*tensors, temperature, True, wants_bank, "torch")
        gathered = weighted_rows(bank, slots.flatten(0, 1).long(), weights.flatten(0, 1), "torch").view_as(gradient)
        into_transform = torch.bmm(*_by_head(gradient.to(transform.dtype), gathered))
        return lookups[0], lookups[1], lookups[2], into_bank, into_transform
    *lookups, into_transform, passed = native_score_gradients(
        gradient, query, row_keys, column_keys, bank, (slots, weights), temperature, transform
    )
    into_bank = bank.new_empty(0)
    if wants_bank:
        into_bank = native_bank_gradient(passed, slots, weights, bank.shape).to(bank.dtype)
    return lookups[0], lookups[1], lookups[2], into_bank, into_transform


@transformed_lookup_backward_op.register_fake
def _(gradient, query, row_keys, column_keys, bank, transform, slots, weights, temperature, wants_bank):  # type: ignore[no-untyped-def]
    wanted = (query, row_keys, column_keys, bank if wants_bank else bank.new_empty(0), transform)
    return tuple(tensor.new_empty(tensor.shape) for tensor in wanted)


def _by_head(gradient: torch.Tensor, gathered: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a gradient `[S, H, v]` as `[H, v, S]` and gathered sums `[S, H, v]` as `[H, S, v]`."""
    return gradient.permute(1, 2, 0), gathered.transpose(0, 1)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    query, row_keys, column_keys, bank, transform, residual, _, ctx.temperature = inputs
    ctx.adds = residual is not None
    _, slots, weights = output
    ctx.save_for_backward(query, row_keys, column_keys, bank, transform, slots, weights)
    ctx.mark_non_differentiable(slots, weights)


def _differentiate(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple:
    needs = ctx.needs_input_grad[:5]
    gradients = transformed_lookup_backward_op(gradient, *ctx.saved_tensors, ctx.temperature, needs[3])
    wanted = (part if need else None for part, need in zip(gradients, needs, strict=True))
    return *wanted, gradient if ctx.adds else None, None, None


transformed_lookup_op.register_autograd(_differentiate, setup_context=_save)

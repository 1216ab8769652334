"""The fused part of head-wise memory as one registered op, which selects, weights, gathers and transforms; and its gradient.

Shapes: query `[S, H, d]`, keys `[H, n, d / 2]`, bank `[N, v]` or `[H, N, v]`, transforms `[H, v, v]` of a bank `[N, v]`,
residual and output `[S, H, v]`. Query and tables share a dtype; a residual may have another, which is then the dtype of
the output. Callers resolve the backend and check shapes.
"""

from typing import Any, Optional

import torch

from midus_hf.ops.dispatch.calling import custom_op
from midus_hf.ops.dispatch.native.library import native_library
from midus_hf.ops.dispatch.precision import narrowest_integer, without_autocast
from midus_hf.ops.gather.native import native_bank_gradient
from midus_hf.ops.gather.row_sums import row_sums, weight_gradients, weighted_rows
from midus_hf.ops.gather.triton import triton_bank_gradient
from midus_hf.ops.midus_hml.native import LookupInputs, native_lookup
from midus_hf.ops.midus_hml.triton import triton_lookup
from midus_hf.ops.product_key.native import native_score_gradients
from midus_hf.ops.product_key.selection import halves, query_and_key_gradients, select
from midus_hf.ops.product_key.triton.gradients import triton_score_gradients

_FEW_SCORES = 4096

# What a lookup keeps for the gradient: slots and their weights, best first, `[S, H, k]` each.
Kept = tuple[torch.Tensor, torch.Tensor]


def lookup(inputs: LookupInputs, backend: str, keeps: bool) -> tuple[torch.Tensor, Kept | None]:
    """Return the output `[S, H, v]`, and the tensors for a gradient if `keeps` is true.

    C transforms the gathered values of a block of tokens while they are in the processor's cache. No tensor of the size
    of all heads' slots is made, neither of expanded values nor of their gradients.
    """
    if backend == "native" and native_library() is not None:
        return native_lookup(inputs, keeps)
    if inputs.transform is None:
        return triton_lookup(inputs, keeps) if backend == "triton" else torch_lookup(inputs)
    gathered, kept = lookup(inputs._replace(transform=None, residual=None), backend, keeps)
    output, residual = transformed(gathered, inputs.transform), inputs.residual
    return output if residual is None else (residual + output).to(residual.dtype), kept


def torch_lookup(inputs: LookupInputs) -> tuple[torch.Tensor, Kept]:
    """Compute a `lookup` without transforms by PyTorch's operations."""
    query, row_keys, column_keys, bank, _, residual, k = inputs
    tokens, heads, _ = query.shape
    n = row_keys.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    with without_autocast(query.device.type):
        row_scores, column_scores = (
            torch.bmm(queries, keys.to(wide).transpose(1, 2))  # [H, S, n]
            for queries, keys in zip(halves(query, wide), (row_keys, column_keys), strict=True)
        )
    rows, columns = select(row_scores, column_scores, k)  # [H, S, k]
    scores = row_scores.gather(-1, rows) + column_scores.gather(-1, columns)
    weights = _weights(scores)  # [H, S, k]
    slots = rows * n + columns
    output = weighted_rows(*_flat(bank, slots), weights.flatten(0, 1), "torch")
    output = output.view(heads, tokens, bank.shape[-1]).transpose(0, 1)
    output = (output if residual is None else (residual + output).to(residual.dtype)).contiguous()
    kept = (slots.transpose(0, 1).to(narrowest_integer(n * n)), weights.transpose(0, 1))
    return output, (kept[0].contiguous(), kept[1].contiguous())


def transformed(gathered: torch.Tensor, transform: torch.Tensor) -> torch.Tensor:
    """Apply `W_h` to the gathered sum of each head h, `[S, H, v]`."""
    return torch.matmul(gathered.transpose(0, 1), transform.transpose(1, 2)).transpose(0, 1).contiguous()


@custom_op("headwise_lookup")
def headwise_lookup_op(
    query: torch.Tensor,
    row_keys: torch.Tensor,
    column_keys: torch.Tensor,
    bank: torch.Tensor,
    transform: Optional[torch.Tensor],  # noqa: UP045 - torch.library reads this form alone
    residual: Optional[torch.Tensor],  # noqa: UP045
    k: int,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output `[S, H, v]`, and for the gradient the slots `[S, H, k]` and their weights `[S, H, k]`, best first."""
    inputs = LookupInputs(query, row_keys, column_keys, bank, transform, residual, k)
    output, kept = lookup(inputs, backend, keeps=True)
    assert kept is not None
    return output, *kept


@headwise_lookup_op.register_fake
def _(query, row_keys, column_keys, bank, transform, residual, k, backend):  # type: ignore[no-untyped-def]
    tokens, heads, _ = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    return (
        (bank if residual is None else residual).new_empty(tokens, heads, bank.shape[-1]),
        query.new_empty(tokens, heads, k, dtype=narrowest_integer(row_keys.shape[1] ** 2)),
        query.new_empty(tokens, heads, k, dtype=wide),
    )


@custom_op("headwise_lookup_backward")
def headwise_lookup_backward_op(
    gradient: torch.Tensor,
    query: torch.Tensor,
    row_keys: torch.Tensor,
    column_keys: torch.Tensor,
    bank: torch.Tensor,
    transform: Optional[torch.Tensor],  # noqa: UP045
    slots: torch.Tensor,
    weights: torch.Tensor,
    wants_scores: bool,
    wants_bank: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return gradients of query, row keys, column keys, bank and transforms, for a gradient `[S, H, v]` of the output.

    The first three are empty tensors if `wants_scores` is false, the fourth if `wants_bank` is false, and the last if
    there are no transforms.
    """
    in_c = backend == "native" and native_library() is not None
    scored = (query, row_keys, column_keys, bank, (slots, weights))
    into_transform, into_scored = bank.new_empty(0), [tensor.new_empty(0) for tensor in scored[:3]]
    if transform is not None and in_c:
        *score_gradients, into_transform, gradient = native_score_gradients(gradient, *scored, transform)
        into_scored = score_gradients if wants_scores else into_scored
    else:
        if transform is not None:
            gathered = weighted_rows(bank, slots.flatten(0, 1).long(), weights.flatten(0, 1), backend)
            gradient = gradient.to(transform.dtype)
            into_transform = torch.bmm(gradient.permute(1, 2, 0), gathered.view(gradient.shape).transpose(0, 1))
            gradient = transformed(gradient, transform.transpose(1, 2))
        if wants_scores:
            differentiate: Any = native_score_gradients if in_c else _score_gradients
            differentiate = triton_score_gradients if backend == "triton" else differentiate
            into_scored = differentiate(gradient, *scored)
    into_bank = _bank_gradient(gradient, slots, weights, bank, backend, in_c) if wants_bank else bank.new_empty(0)
    return into_scored[0], into_scored[1], into_scored[2], into_bank, into_transform


def _bank_gradient(
    gradient: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, bank: torch.Tensor, backend: str, in_c: bool
) -> torch.Tensor:
    """Return the gradient of the bank, in its dtype, for a gradient `[S, H, v]` of the gathered sums."""
    if in_c:
        return native_bank_gradient(gradient, slots, weights, bank.shape).to(bank.dtype)
    if backend == "triton":
        return triton_bank_gradient(gradient, slots, weights, bank.shape, bank.dtype)
    flat_bank, flat_slots = _flat(bank, slots.transpose(0, 1).long())
    by_head, weights_of_head = (tensor.transpose(0, 1).flatten(0, 1) for tensor in (gradient, weights))
    return row_sums(by_head, flat_slots, weights_of_head, len(flat_bank), "torch").view(bank.shape).to(bank.dtype)


@headwise_lookup_backward_op.register_fake
def _(  # type: ignore[no-untyped-def]
    gradient, query, row_keys, column_keys, bank, transform, slots, weights, wants_scores, wants_bank, backend
):  # fmt: skip
    wanted = ((query, wants_scores), (row_keys, wants_scores), (column_keys, wants_scores), (bank, wants_bank))
    into_transform = bank.new_empty(0) if transform is None else transform.new_empty(transform.shape)
    return *(tensor.new_empty(tensor.shape if wants else 0) for tensor, wants in wanted), into_transform


def _score_gradients(
    gradient: torch.Tensor,
    query: torch.Tensor,
    row_keys: torch.Tensor,
    column_keys: torch.Tensor,
    bank: torch.Tensor,
    kept: Kept,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return gradients of query, row keys and column keys, through the softmax and the chosen scores."""
    slots, weights = kept
    slots_of_head = slots.transpose(0, 1).long()  # [H, S, k]
    weights_of_head = weights.transpose(0, 1).contiguous()  # [H, S, k]
    by_head = gradient.transpose(0, 1).flatten(0, 1)  # [H * S, v]
    into_weights = weight_gradients(by_head, *_flat(bank, slots_of_head), "torch").view_as(weights_of_head)
    mean = (into_weights * weights_of_head).sum(-1, keepdim=True)
    into_scores = weights_of_head * (into_weights - mean)  # [H, S, k]
    return query_and_key_gradients(into_scores, slots_of_head, query, row_keys, column_keys)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, residual, _, ctx.backend = inputs
    ctx.adds = residual is not None
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple:
    needs = ctx.needs_input_grad[:5]
    gradients = headwise_lookup_backward_op(gradient, *ctx.saved_tensors, any(needs[:3]), needs[3], ctx.backend)
    wanted = (part if need else None for part, need in zip(gradients, needs, strict=True))
    return *wanted, gradient if ctx.adds else None, None, None


headwise_lookup_op.register_autograd(_differentiate, setup_context=_save)


def _weights(scores: torch.Tensor) -> torch.Tensor:
    """Return the softmax of descending scores."""
    if scores.numel() <= _FEW_SCORES:
        return scores.softmax(dim=-1)
    shares = (scores - scores[..., :1]).exp_()  # for so few columns, torch's softmax takes five times as long
    return shares.div_(shares.sum(-1, keepdim=True))


def _flat(bank: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a flat bank `[R, v]` and, for slots `[H, S, k]` of each head, slots `[H * S, k]` into that bank."""
    if bank.dim() == 2:
        return bank, slots.flatten(0, 1)
    heads, slots_of_head, _ = bank.shape
    offsets = slots_of_head * torch.arange(heads, device=slots.device).view(heads, 1, 1)
    return bank.flatten(0, 1), (slots + offsets).flatten(0, 1)

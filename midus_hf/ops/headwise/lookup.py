"""The fused part of head-wise memory as one registered op, which selects, weighs and gathers; and its gradient.

Shapes: query `[S, H, d]`, keys `[H, n, d / 2]`, bank `[N, v]` or `[H, N, v]`, residual and output `[S, H, v]`. Query
and tables share a dtype; a residual may have another, which is then the dtype of the output. Callers have resolved the
name of the body and checked shapes.
"""

from typing import Any, Optional

import torch

from midus_hf.ops.dispatch.calling import custom_op
from midus_hf.ops.dispatch.native.library import native_library
from midus_hf.ops.dispatch.precision import narrowest_integer, without_autocast
from midus_hf.ops.gather.native import native_bank_gradient
from midus_hf.ops.gather.row_sums import row_sums, weight_gradients, weighted_rows
from midus_hf.ops.gather.triton import triton_bank_gradient
from midus_hf.ops.headwise.inputs import LookupInputs
from midus_hf.ops.headwise.native import native_lookup
from midus_hf.ops.headwise.triton import triton_lookup
from midus_hf.ops.product_key.native import native_score_gradients
from midus_hf.ops.product_key.selection import halves, query_and_key_gradients, select
from midus_hf.ops.product_key.triton.gradients import triton_score_gradients

_FEW_SCORES = 4096


def lookup(
    query: torch.Tensor,
    row_keys: torch.Tensor,
    column_keys: torch.Tensor,
    bank: torch.Tensor,
    residual: Optional[torch.Tensor],  # noqa: UP045 - torch.library reads this form alone
    k: int,
    temperature: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output `[S, H, v]`, and for the gradient the slots `[S, H, k]` and their weights `[S, H, k]`, best first."""
    inputs = LookupInputs(query, row_keys, column_keys, bank, residual, k, temperature)
    if backend == "triton":
        return triton_lookup(inputs)
    if backend == "native" and native_library() is not None:
        return native_lookup(inputs)
    return torch_lookup(inputs)


headwise_lookup_op = custom_op("headwise_lookup")(lookup)


def torch_lookup(inputs: LookupInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute `lookup` by PyTorch's operations."""
    query, row_keys, column_keys, bank, residual, k, temperature = inputs
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
    weights = _weights(scores, temperature)  # [H, S, k]
    slots = rows * n + columns
    output = weighted_rows(*_flat(bank, slots), weights.flatten(0, 1), "torch")
    output = output.view(heads, tokens, bank.shape[-1]).transpose(0, 1)
    return (
        (output if residual is None else (residual + output).to(residual.dtype)).contiguous(),
        slots.transpose(0, 1).to(narrowest_integer(n * n)).contiguous(),
        weights.transpose(0, 1).contiguous(),
    )


@headwise_lookup_op.register_fake
def _(query, row_keys, column_keys, bank, residual, k, temperature, backend):  # type: ignore[no-untyped-def]
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
    slots: torch.Tensor,
    weights: torch.Tensor,
    temperature: float,
    wants_scores: bool,
    wants_bank: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return gradients of query, row keys, column keys and bank, for a gradient `[S, H, v]` of the output.

    The first three are empty tensors if `wants_scores` is false, the last if `wants_bank` is false.
    """
    into_query, into_row_keys, into_column_keys, into_bank = (
        tensor.new_empty(0) for tensor in (query, row_keys, column_keys, bank)
    )
    in_c = backend == "native" and native_library() is not None
    if wants_scores:
        differentiate: Any = native_score_gradients if in_c else _score_gradients
        differentiate = triton_score_gradients if backend == "triton" else differentiate
        scored = (gradient, query, row_keys, column_keys, bank, (slots, weights), temperature)
        into_query, into_row_keys, into_column_keys = differentiate(*scored)
    if wants_bank and in_c:
        into_bank = native_bank_gradient(gradient, slots, weights, bank.shape).to(bank.dtype)
    elif wants_bank and backend == "triton":
        into_bank = triton_bank_gradient(gradient, slots, weights, bank.shape, bank.dtype)
    elif wants_bank:
        flat_bank, flat_slots = _flat(bank, slots.transpose(0, 1).long())
        by_head, weights_of_head = (tensor.transpose(0, 1).flatten(0, 1) for tensor in (gradient, weights))
        sums = row_sums(by_head, flat_slots, weights_of_head, len(flat_bank), "torch")
        into_bank = sums.view(bank.shape).to(bank.dtype)
    return into_query, into_row_keys, into_column_keys, into_bank


@headwise_lookup_backward_op.register_fake
def _(  # type: ignore[no-untyped-def]
    gradient,
    query,
    row_keys,
    column_keys,
    bank,
    slots,
    weights,
    temperature,
    wants_scores,
    wants_bank,
    backend,
):
    wanted = ((query, wants_scores), (row_keys, wants_scores), (column_keys, wants_scores), (bank, wants_bank))
    return tuple(tensor.new_empty(tensor.shape if wants else 0) for tensor, wants in wanted)


def _score_gradients(
    gradient: torch.Tensor,
    query: torch.Tensor,
    row_keys: torch.Tensor,
    column_keys: torch.Tensor,
    bank: torch.Tensor,
    kept: tuple[torch.Tensor, torch.Tensor],
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return gradients of query, row keys and column keys, through the softmax and the chosen scores."""
    slots, weights = kept
    slots_of_head = slots.transpose(0, 1).long()  # [H, S, k]
    weights_of_head = weights.transpose(0, 1).contiguous()  # [H, S, k]
    by_head = gradient.transpose(0, 1).flatten(0, 1)  # [H * S, v]
    into_weights = weight_gradients(by_head, *_flat(bank, slots_of_head), "torch").view_as(weights_of_head)
    mean = (into_weights * weights_of_head).sum(-1, keepdim=True)
    into_scores = weights_of_head * (into_weights - mean) / temperature  # [H, S, k]
    return query_and_key_gradients(into_scores, slots_of_head, query, row_keys, column_keys)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    query, row_keys, column_keys, bank, residual, _, ctx.temperature, ctx.backend = inputs
    ctx.adds = residual is not None
    _, slots, weights = output
    ctx.save_for_backward(query, row_keys, column_keys, bank, slots, weights)
    ctx.mark_non_differentiable(slots, weights)


def _differentiate(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple:
    needs = ctx.needs_input_grad[:4]
    gradients = headwise_lookup_backward_op(
        gradient, *ctx.saved_tensors, ctx.temperature, any(needs[:3]), needs[3], ctx.backend
    )
    wanted = (part if need else None for part, need in zip(gradients, needs, strict=True))
    return *wanted, gradient if ctx.adds else None, None, None, None


headwise_lookup_op.register_autograd(_differentiate, setup_context=_save)


def _weights(scores: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the softmax of descending scores divided by the temperature."""
    if temperature != 1:
        scores = scores / temperature
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

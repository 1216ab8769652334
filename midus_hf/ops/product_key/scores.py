"""Product-key retrieval by kernels or C as one registered op, which never stores the scores of all sub-keys; and its gradient."""

from typing import Any

import torch

from midus_hf.ops.dispatch.calling import custom_op
from midus_hf.ops.dispatch.native.library import native_library
from midus_hf.ops.product_key.native import native_gradients_of_scores, native_scores
from midus_hf.ops.product_key.reference import product_key_topk
from midus_hf.ops.product_key.selection import query_and_key_gradients
from midus_hf.ops.product_key.triton.forward import triton_scores
from midus_hf.ops.product_key.triton.gradients import triton_gradients_of_scores


@custom_op("product_key_scores")
def product_key_scores_op(
    query: torch.Tensor, row_keys: torch.Tensor, column_keys: torch.Tensor, k: int, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores, float32, descending, and slots, int64, of the k best slots: `[S, H, k]` each.

    The query `[S, H, d]` and the keys `[H, n, d / 2]` share a dtype. The backend is `"triton"` or `"native"`.
    """
    if backend == "triton":
        return triton_scores(query, row_keys, column_keys, k)
    if native_library() is not None:
        return native_scores(query, row_keys, column_keys, k)
    return product_key_topk(query, row_keys, column_keys, k)


@product_key_scores_op.register_fake
def _(query, row_keys, column_keys, k, backend):  # type: ignore[no-untyped-def]
    kept = (*query.shape[:2], k)
    return query.new_empty(kept, dtype=torch.float32), query.new_empty(kept, dtype=torch.int64)


@custom_op("product_key_scores_backward")
def product_key_scores_backward_op(
    gradient: torch.Tensor,
    query: torch.Tensor,
    row_keys: torch.Tensor,
    column_keys: torch.Tensor,
    slots: torch.Tensor,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return gradients of query, row keys and column keys for a gradient `[S, H, k]` of scores."""
    if backend == "triton":
        return triton_gradients_of_scores(gradient, query, row_keys, column_keys, slots)
    if native_library() is None:
        by_head = (gradient.float().transpose(0, 1).contiguous(), slots.transpose(0, 1))
        return query_and_key_gradients(*by_head, query, row_keys, column_keys)
    gradients = native_gradients_of_scores(gradient, query, row_keys, column_keys, slots)
    return gradients[0], gradients[1], gradients[2]


@product_key_scores_backward_op.register_fake
def _(gradient, query, row_keys, column_keys, slots, backend):  # type: ignore[no-untyped-def]
    return tuple(tensor.new_empty(tensor.shape) for tensor in (query, row_keys, column_keys))


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    query, row_keys, column_keys, _, ctx.body = inputs
    _, slots = output
    ctx.save_for_backward(query, row_keys, column_keys, slots)
    ctx.mark_non_differentiable(slots)


def _differentiate(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple:
    return *product_key_scores_backward_op(gradient, *ctx.saved_tensors, ctx.body), None, None


product_key_scores_op.register_autograd(_differentiate, setup_context=_save)

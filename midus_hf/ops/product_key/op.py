"""Product-key retrieval: the k best of n * n keys at the cost of scoring 2 * n sub-keys."""

from typing import Any

import torch

from midus_hf.ops.dispatch.calling import custom_op
from midus_hf.ops.dispatch.choices import resolve
from midus_hf.ops.dispatch.native.library import native_library
from midus_hf.ops.dispatch.private_torch import can_skip_dispatcher
from midus_hf.ops.product_key.native import native_gradients_of_scores, native_refusal, native_scores
from midus_hf.ops.product_key.reference import product_key_topk as reference
from midus_hf.ops.product_key.reference import sub_key_scores
from midus_hf.ops.product_key.selection import query_and_key_gradients, select
from midus_hf.ops.product_key.triton.forward import scores_refusal, triton_scores
from midus_hf.ops.product_key.triton.gradients import triton_gradients_of_scores


def product_key_topk(
    query: torch.Tensor,
    row_keys: torch.Tensor,
    column_keys: torch.Tensor,
    k: int,
    *,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find, for every head, the `k` product keys that score highest against its query.

    Slot `i * n + j` has the score `<q_row, K_row[i]> + <q_column, K_column[j]>`, where `q_row` and `q_column` are the
    halves of the query. The k best slots all lie in the grid of the k best rows and the k best columns, so two small
    selections give exactly the result of one selection over all `n * n` slots (MIDUS, equations 11 to 13).

    Scores of half-precision queries are accumulated in float32, also under `torch.autocast`, because rounding them
    first would change the selection. Among slots of equal scores, any may be chosen.

    One token may choose a sub-key up to k times. PyTorch on CUDA adds the gradients of these choices in any order,
    kernels and C in a fixed order. Results of kernels and C can be differentiated once; with `backend="torch"`,
    gradients can be differentiated as well, transformed by `torch.func`, and computed in forward mode.

    Args:
        query: `[..., H, d]`, floating point, `d` even.
        row_keys: `[H, n, d / 2]`, cast to the dtype of `query`.
        column_keys: `[H, n, d / 2]`, cast to the dtype of `query`.
        k: Slots retrieved per head, `1 <= k <= n`.
        backend: Body to run, as in `OpChoices`. Default: `"auto"`.

    Returns:
        Scores `[..., H, k]`, descending, float32 (float64 for a float64 query), and slots `[..., H, k]`, int64.

    Raises:
        ValueError: If the shapes disagree, `d` is odd, or `k` lies outside `1..n`; or if `"triton"` is chosen for
            sub-keys that kernels do not support: very wide ones, or more than 128 per side in float32.
    """
    check_product_keys(query, row_keys, column_keys, k)
    heads, n, half = row_keys.shape
    body = resolve(backend, query, scores_refusal(query.dtype, n, k, half), native_refusal(n, k))
    if body == "reference":
        return reference(query, row_keys, column_keys, k)
    if body in ("native", "triton"):
        flat = (query.reshape(-1, heads, 2 * half), row_keys.to(query.dtype), column_keys.to(query.dtype))
        if not can_skip_dispatcher(*flat):
            results = product_key_scores_op(*flat, k, body)
        elif body == "triton":
            results = triton_scores(*flat, k)
        else:
            results = native_scores(*flat, k)
        scores, slots = (tensor.view(*query.shape[:-1], k) for tensor in results)
        return scores, slots
    row_scores, column_scores = sub_key_scores(query, row_keys, column_keys)  # 2 x [..., H, n]
    with torch.no_grad():
        rows, columns = select(row_scores, column_scores, k)
    return row_scores.gather(-1, rows) + column_scores.gather(-1, columns), rows * n + columns


def check_product_keys(query: torch.Tensor, row_keys: torch.Tensor, column_keys: torch.Tensor, k: int) -> None:
    """Raise a `ValueError` if shapes disagree or `k` is out of range."""
    shape, query_shape = (
        row_keys.shape,
        query.shape,
    )  # read once: reading a tensor's shape takes longer than comparing two
    if len(shape) != 3:
        raise ValueError(f"row_keys is {tuple(shape)}; expected [heads, n, sub-key width].")
    heads, n, half = shape
    if column_keys.shape != shape:
        raise ValueError(f"column_keys is {tuple(column_keys.shape)}; expected the shape of row_keys, {tuple(shape)}.")
    if len(query_shape) < 2 or query_shape[-2] != heads or query_shape[-1] != 2 * half:
        raise ValueError(
            f"query ends in {tuple(query_shape[-2:])}; expected (heads, 2 * sub-key width) = ({heads}, {2 * half})."
        )
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}; expected 1 <= k <= n = {n}. Lower k or raise n.")


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
    return reference(query, row_keys, column_keys, k)


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

"""Product-key retrieval: the k best of n * n keys at the price of scoring 2 * n sub-keys."""

import torch

from midus_hf.ops.dispatch.calling import are_plain, nobody_watches
from midus_hf.ops.dispatch.choices import resolve
from midus_hf.ops.dispatch.private_torch import is_transformed
from midus_hf.ops.product_key.native import native_refusal, native_scores
from midus_hf.ops.product_key.reference import product_key_topk as reference
from midus_hf.ops.product_key.reference import sub_key_scores
from midus_hf.ops.product_key.scores import product_key_scores_op
from midus_hf.ops.product_key.selection import select
from midus_hf.ops.product_key.triton.forward import scores_refusal, triton_scores


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
    gradients can be differentiated as well. Under transforms of `torch.func` and in forward mode, PyTorch computes the
    result.

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
            sub-keys that kernels have no room for: very wide ones, or more than 128 per side in float32.
    """
    check_product_keys(query, row_keys, column_keys, k)
    heads, n, half = row_keys.shape
    body = resolve(backend, query, scores_refusal(query.dtype, n, k, half), native_refusal(n, k))
    if body == "reference":
        return reference(query, row_keys, column_keys, k)
    if body in ("native", "triton") and not is_transformed():
        flat = (query.reshape(-1, heads, 2 * half), row_keys.to(query.dtype), column_keys.to(query.dtype))
        if not (nobody_watches() and are_plain(*flat)):
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

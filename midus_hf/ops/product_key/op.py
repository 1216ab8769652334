"""Product-key retrieval: the k best of n * n keys at the cost of scoring 2 * n sub-keys."""

import functools

import torch
from torch import Tensor

from midus_hf.ops.dispatch.calling import differentiable_op, resolve, without_autocast
from midus_hf.ops.dispatch.library import native_library
from midus_hf.ops.dispatch.private_torch import can_skip_dispatcher
from midus_hf.ops.product_key.native import native_refusal, native_score_gradients, native_scores
from midus_hf.ops.product_key.triton import scores_refusal, triton_score_gradients, triton_scores

_FEW_ELEMENTS = 1 << 15
_FEW_COLUMNS = 24


def reference_product_key_topk(query: Tensor, row_keys: Tensor, column_keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Find, for every head, the `k` best product keys for its query (MIDUS, equations 11 to 13).

    Shapes: query `[..., H, d]`, sub-keys `[H, n, d / 2]` per side. Returns scores `[..., H, k]`, descending, and slots, int64.
    """
    row_scores, column_scores = sub_key_scores(query, row_keys, column_keys)
    row_best, rows = row_scores.topk(k, dim=-1)  # [..., H, k]
    column_best, columns = column_scores.topk(k, dim=-1)  # [..., H, k]
    pair_scores = (row_best.unsqueeze(-1) + column_best.unsqueeze(-2)).flatten(-2)  # [..., H, k * k]
    scores, pairs = pair_scores.topk(k, dim=-1)  # [..., H, k]
    slots = rows.gather(-1, pairs // k) * row_keys.shape[1] + columns.gather(-1, pairs % k)  # [..., H, k]
    return scores, slots


def sub_key_scores(query: Tensor, row_keys: Tensor, column_keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores of row and column keys, `[..., H, n]`, float32 at least (MIDUS, equation 11).

    Keys are cast to the dtype of the query first.
    """
    row_keys, column_keys = row_keys.to(query.dtype), column_keys.to(query.dtype)
    score_dtype = torch.promote_types(query.dtype, torch.float32)
    query_row, query_column = query.to(score_dtype).split(row_keys.shape[-1], dim=-1)  # 2 x [..., H, d / 2]
    with without_autocast(query.device.type):
        return (
            torch.einsum("...hp,hnp->...hn", query_row, row_keys.to(score_dtype)),
            torch.einsum("...hp,hnp->...hn", query_column, column_keys.to(score_dtype)),
        )


def product_key_topk(
    query: Tensor, row_keys: Tensor, column_keys: Tensor, k: int, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Find, for every head, the `k` product keys that score highest against its query.

    Slot `i * n + j` has the score `<q_row, K_row[i]> + <q_column, K_column[j]>`, where `q_row` and `q_column` are the halves of the
    query. The k best slots all lie in the grid of the k best rows and the k best columns, so two small selections give exactly the
    result of one selection over all `n * n` slots (MIDUS, equations 11 to 13).

    Scores of half-precision queries are accumulated in float32, also under `torch.autocast`, because rounding them first would change
    the selection. Among slots of equal scores, any may be chosen.

    PyTorch on CUDA adds the gradients of a sub-key that a token chooses several times in any order, kernels and C in a fixed order.
    Kernels and C can be differentiated once; with `backend="torch"`, gradients can be differentiated as well, transformed by
    `torch.func`, and computed in forward mode.

    Args:
        query: `[..., H, d]`, floating point, `d` even.
        row_keys: `[H, n, d / 2]`, cast to the dtype of `query`.
        column_keys: `[H, n, d / 2]`, cast to the dtype of `query`.
        k: Slots retrieved per head, `1 <= k <= n`.
        backend: Body to run, as in `OpChoices`. Default: `"auto"`.

    Returns:
        Scores `[..., H, k]`, descending, float32 (float64 for a float64 query), and slots `[..., H, k]`, int64.

    Raises:
        ValueError: If the shapes disagree, `d` is odd, or `k` lies outside `1..n`; or if `"triton"` is chosen for sub-keys that
            kernels do not support: very wide ones, or more than 128 per side in float32.
    """
    check_product_keys(query, row_keys, column_keys, k)
    heads, n, half = row_keys.shape
    body = resolve(backend, query, scores_refusal(query.dtype, n, k, half), native_refusal(n, k))
    if body == "reference":
        return reference_product_key_topk(query, row_keys, column_keys, k)
    if body in ("native", "triton"):
        flat = (query.reshape(-1, heads, 2 * half), row_keys.to(query.dtype), column_keys.to(query.dtype))
        find = _best_scores if can_skip_dispatcher(*flat) else product_key_scores_op
        scores, slots = (tensor.view(*query.shape[:-1], k) for tensor in find(*flat, k, body))
        return scores, slots
    row_scores, column_scores = sub_key_scores(query, row_keys, column_keys)  # 2 x [..., H, n]
    with torch.no_grad():
        rows, columns = select(row_scores, column_scores, k)
    return row_scores.gather(-1, rows) + column_scores.gather(-1, columns), rows * n + columns


def check_product_keys(query: Tensor, row_keys: Tensor, column_keys: Tensor, k: int) -> None:
    shape, query_shape = row_keys.shape, query.shape  # reading a tensor's shape takes longer than comparing two
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


def _best_scores(query: Tensor, row_keys: Tensor, column_keys: Tensor, k: int, backend: str) -> tuple[Tensor, Tensor]:
    """Return scores, float32, descending, and slots, int64, `[S, H, k]` each, by `"triton"` or `"native"`."""
    if backend == "triton":
        return triton_scores(query, row_keys, column_keys, k)
    if native_library() is not None:
        return native_scores(query, row_keys, column_keys, k)
    return reference_product_key_topk(query, row_keys, column_keys, k)


def _score_gradients(
    gradient: Tensor,
    query: Tensor,
    row_keys: Tensor,
    column_keys: Tensor,
    slots: Tensor,
    wants: list[bool],
    backend: str,
) -> tuple[Tensor, ...]:
    tensors = (query, row_keys, column_keys)
    if backend == "triton":
        return triton_score_gradients(gradient, *tensors, slots)
    if native_library() is not None:
        return native_score_gradients(None, *tensors, slots, (query, gradient.float()))
    return query_and_key_gradients(gradient.float().transpose(0, 1).contiguous(), slots.transpose(0, 1), *tensors)


product_key_scores_op = differentiable_op(
    "product_key_scores",
    _best_scores,
    _score_gradients,
    lambda query, row_keys, column_keys, k, backend: tuple(
        query.new_empty(*query.shape[:2], k, dtype=dtype) for dtype in (torch.float32, torch.int64)
    ),
    gradients=("query", "row_keys", "column_keys"),
    outputs=("scores", "slots"),
)


def largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return `scores.topk(k, dim=-1)` of `[..., n]` without NaN, by groups on a CPU, which is faster.

    The k largest scores lie in the k groups with the largest maxima, so the result is exact. Among equal scores, any may be chosen.
    """
    n = scores.shape[-1]
    size = _group_size(n, k)
    if scores.device.type != "cpu" or size == 1 or scores.numel() < _FEW_ELEMENTS:
        return scores.topk(k, dim=-1)
    groups = -(-n // size)
    if size * groups > n:
        scores = torch.nn.functional.pad(scores, (0, size * groups - n), value=-torch.inf)
    maxima = functools.reduce(torch.maximum, scores.split(groups, dim=-1))  # group g holds g, g + groups, ...
    best = maxima.topk(k, dim=-1).indices  # [..., k]
    members = scores.unflatten(-1, (size, groups)).gather(-1, best.unsqueeze(-2).expand(*best.shape[:-1], size, k))
    values, places = members.flatten(-2).topk(k, dim=-1)
    return values, (places // k) * groups + best.gather(-1, places % k)


def _group_size(n: int, k: int) -> int:
    """Return the group size, a power of two, that leaves the fewest columns; 1 if grouping saves little."""
    best, fewest = 1, n
    size = 2
    while n > _FEW_COLUMNS and size < n and -(-n // size) >= k:
        left = -(-n // size) + size * k
        if left < fewest:
            best, fewest = size, left
        size *= 2
    return best if fewest <= 0.75 * n else 1


def select(row_scores: Tensor, column_scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return rows and columns of the k best slots, best first, `[..., k]`, int64, for scores `[..., n]`."""
    row_best, rows = largest(row_scores, k)
    column_best, columns = largest(column_scores, k)
    # A sum of ranks i and j can be among the k best only if (i + 1)(j + 1) <= k: that many sums are at least as large.
    steps = [(slice(i, i + 1), slice(0, k // (i + 1))) for i in range(k)]
    sums = torch.cat([row_best[..., i] + column_best[..., j] for i, j in steps], dim=-1)
    best = sums.topk(k, dim=-1).indices
    rows_of_sums = torch.cat([rows[..., i].expand(*rows.shape[:-1], j.stop) for i, j in steps], dim=-1)
    columns_of_sums = torch.cat([columns[..., j] for _, j in steps], dim=-1)
    return rows_of_sums.gather(-1, best), columns_of_sums.gather(-1, best)


def halves(query: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a query's halves, `[H, S, d / 2]`, copied, since the layout changes the rounding of products."""
    rows, columns = query.unflatten(-1, (2, -1)).permute(2, 1, 0, 3).to(dtype).contiguous()
    return rows, columns


def query_and_key_gradients(
    into_scores: Tensor, slots: Tensor, query: Tensor, row_keys: Tensor, column_keys: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of query `[S, H, d]`, row keys and column keys `[H, n, d / 2]`, in their dtypes.

    `into_scores` has the gradient of the scores of the chosen `slots`, both `[H, S, k]`, float32 at least and int64.
    """
    n, wide = row_keys.shape[1], into_scores.dtype
    into_query, into_keys = [], []
    for keys, chosen, queries in zip(
        (row_keys, column_keys), (slots // n, slots % n), halves(query, wide), strict=True
    ):
        spread = into_scores.new_zeros(*into_scores.shape[:2], n).scatter_add_(-1, chosen, into_scores)  # [H, S, n]
        with without_autocast(query.device.type):
            into_query.append(torch.bmm(spread, keys.to(wide)))  # [H, S, d / 2]
            into_keys.append(torch.bmm(spread.transpose(1, 2), queries).to(keys.dtype))  # [H, n, d / 2]
    return torch.cat(into_query, dim=-1).transpose(0, 1).to(query.dtype).contiguous(), into_keys[0], into_keys[1]


_MAX_SCORES = 1 << 26  # largest number of scores that are held at a time: 256 MB in float32
_MAX_WIDENED = 1 << 20  # largest number of elements of keys that a CPU holds in float32 at a time: 4 MB


def flat_key_topk(query: Tensor, keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Find, for every head, the `k` keys that score highest against its query (MIDUS, equation 4).

    Scores of half-precision queries are accumulated in float32, also under `torch.autocast`. All N scores of a token exist only while
    the best are picked. Gradients flow through the scores of the picked keys.

    Args:
        query: `[..., H, d]`, floating point.
        keys: `[H, N, d]`, cast to the dtype of `query`.
        k: Slots retrieved per head, `1 <= k <= N`.

    Returns:
        Scores `[..., H, k]`, descending, float32 (float64 for a float64 query), and slots `[..., H, k]`, int64.

    Raises:
        ValueError: If the shapes disagree, or `k` lies outside `1..N`.
    """
    if keys.dim() != 3:
        raise ValueError(f"keys is {tuple(keys.shape)}; expected [heads, slots, key width].")
    heads, slots, width = keys.shape
    if query.shape[-2:] != (heads, width):
        raise ValueError(f"query ends in {tuple(query.shape[-2:])}; expected (heads, key width) = ({heads}, {width}).")
    if not 1 <= k <= slots:
        raise ValueError(f"k is {k}; expected 1 <= k <= N = {slots}. Lower k or raise N.")
    score_dtype = torch.promote_types(query.dtype, torch.float32)
    leading = query.shape[:-2]
    rounded_keys = keys.to(query.dtype)
    with without_autocast(query.device.type):
        flat_query = query.reshape(-1, heads, width).transpose(0, 1).to(score_dtype)  # [H, S, d]
        with torch.no_grad():
            chosen = _best_keys(flat_query, rounded_keys, k)  # [H, S, k]
        offsets = slots * torch.arange(heads, device=query.device).view(heads, 1, 1)
        all_keys = rounded_keys.flatten(0, 1)  # [H * N, d]
        if torch.is_grad_enabled() and all_keys.requires_grad:
            # Thousands of tokens may choose one key: this copy sums the gradient of the key in float32.
            all_keys = all_keys.to(score_dtype)
        chosen_keys = torch.nn.functional.embedding(chosen + offsets, all_keys).to(score_dtype)  # [H, S, k, d]
        scores = (chosen_keys * flat_query.unsqueeze(2)).sum(-1)  # [H, S, k]
    return scores.transpose(0, 1).reshape(*leading, heads, k), chosen.transpose(0, 1).reshape(*leading, heads, k)


def _best_keys(query: Tensor, keys: Tensor, k: int) -> Tensor:
    """Return the indices `[H, S, k]` of the best keys, widened by heads so that a CPU's cache holds them."""
    heads, slots, width = keys.shape
    together = max(1, _MAX_WIDENED // (slots * width)) if keys.device.type == "cpu" else heads
    stretch = max(1, _MAX_SCORES // (min(together, heads) * slots))
    best = []
    for keys_of_heads, queries in zip(keys.split(together), query.split(together), strict=True):
        columns = keys_of_heads.to(query.dtype).transpose(1, 2)  # [H', d, N]
        parts = [torch.bmm(part, columns).topk(k, dim=-1).indices for part in queries.split(stretch, dim=1)]
        best.append(torch.cat(parts, dim=1))  # [H', S, k]
    return torch.cat(best)

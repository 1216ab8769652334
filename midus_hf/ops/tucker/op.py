"""Tucker-decomposed query-key retrieval (TDQKR): the k best pairs of a row and a column key, whose scores a small core mixes."""

import torch

from midus_hf.ops.product_key.selection import largest

# Largest number of scores of pairs that are held at a time: 64 MB in float32.
_MOST_SCORES = 1 << 24


def tucker_topk(
    row_scores: torch.Tensor,
    column_scores: torch.Tensor,
    core: torch.Tensor,
    row_vector: torch.Tensor,
    column_vector: torch.Tensor,
    k: int,
    side: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find, for every head, k pairs of a row and a column key with large scores (UltraMemV2, equations 6, 7, 10 and 11).

    The pair of row i of set a and column j of set b has the score
    `row_scores[a, i] @ core[a, b] @ column_scores[b, j]`. The first stage approximates each core by its leading
    singular value, and keeps for each pair of sets the `side` rows and the `side` columns with the largest leading
    scores, `row_scores @ row_vector` and `column_scores @ column_vector`. The second stage scores all pairs of the kept
    rows and columns exactly. These are the k best of all pairs if cores have rank 1, `side >= k` and all leading scores
    are positive.

    Args:
        row_scores: Scores of the row keys of each set and rank, `[..., H, h, n, r]`, floating point.
        column_scores: Scores of the column keys of each set and rank, `[..., H, h, n, r]`.
        core: Core of each pair of sets, `[H, h, h, r, r]`.
        row_vector: Leading left singular vector of each core, `[H, h, h, r]`.
        column_vector: Leading right singular vector of each core, `[H, h, h, r]`.
        k: Slots retrieved per head, `1 <= k <= h * h * side * side`.
        side: Rows, and columns, that the first stage keeps per pair of sets, `1 <= side <= n`.

    Returns:
        Scores `[..., H, k]`, descending, in the dtype of the scores, and slots `[..., H, k]`, int64: slot
        `((a * h + b) * n + i) * n + j` is row i of set a with column j of set b.

    Raises:
        ValueError: If shapes disagree, or `k` or `side` lie outside their range.
    """
    _check(row_scores, column_scores, core, row_vector, column_vector, k, side)
    leading = row_scores.shape[:-4]
    rows, columns = row_scores.flatten(0, -5), column_scores.flatten(0, -5)  # [S, H, h, n, r]
    core = core.to(rows.dtype)
    with torch.no_grad():
        slots = select(rows, columns, core, row_vector.to(rows.dtype), column_vector.to(rows.dtype), k, side)
    scores = slot_scores(rows, columns, core, slots)
    return scores.unflatten(0, leading), slots.unflatten(0, leading)


def select(
    rows: torch.Tensor,
    columns: torch.Tensor,
    core: torch.Tensor,
    row_vector: torch.Tensor,
    column_vector: torch.Tensor,
    k: int,
    side: int,
) -> torch.Tensor:
    """Return the chosen slots `[S, H, k]`, best first, with the arguments of `tucker_topk` and one leading dimension."""
    heads, sets = rows.shape[1:3]
    stretch = max(1, _MOST_SCORES // (heads * sets**2 * side**2))
    if rows.shape[0] <= stretch:  # `len` would fix the sizes of a traced graph
        return _select(rows, columns, core, row_vector, column_vector, k, side)
    parts = zip(rows.split(stretch), columns.split(stretch), strict=True)
    return torch.cat([_select(*part, core, row_vector, column_vector, k, side) for part in parts])


def _select(
    rows: torch.Tensor,
    columns: torch.Tensor,
    core: torch.Tensor,
    row_vector: torch.Tensor,
    column_vector: torch.Tensor,
    k: int,
    side: int,
) -> torch.Tensor:
    n, rank = rows.shape[-2:]
    row_leading = torch.einsum("shanr,habr->shabn", rows, row_vector)
    column_leading = torch.einsum("shbnr,habr->shabn", columns, column_vector)
    best_rows, best_columns = largest(row_leading, side)[1], largest(column_leading, side)[1]  # [S, H, h, h, side]
    kept_rows = _at(rows.unsqueeze(3), best_rows, rank)  # [S, H, h, h, side, r]
    kept_columns = _at(columns.unsqueeze(2), best_columns, rank)
    grid = (kept_rows @ core) @ kept_columns.transpose(-1, -2)  # [S, H, h, h, side, side]
    pairs = grid.flatten(2).topk(k, dim=-1).indices  # [S, H, k]
    if grid.shape[2:4] == (1, 1):  # one block; in decoding, the arithmetic of blocks would take noticeable time
        row, column = best_rows.flatten(2).gather(-1, pairs // side), best_columns.flatten(2).gather(-1, pairs % side)
        return row * n + column
    block, within = pairs // side**2, pairs % side**2
    row = best_rows.flatten(2).gather(-1, block * side + within // side)
    column = best_columns.flatten(2).gather(-1, block * side + within % side)
    return (block * n + row) * n + column


def _at(scores: torch.Tensor, keys: torch.Tensor, rank: int) -> torch.Tensor:
    """Gather the scores `[S, H, h or 1, 1 or h, n, r]` of keys `[S, H, h, h, side]`, to `[S, H, h, h, side, r]`."""
    every = scores.expand(*keys.shape[:-1], *scores.shape[-2:])
    return every.gather(-2, keys.unsqueeze(-1).expand(*keys.shape, rank))


def slot_scores(rows: torch.Tensor, columns: torch.Tensor, core: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the exact scores of slots `[S, H, k]`, in the dtype of `rows`; they are differentiable in rows, columns and core."""
    sets, n, rank = rows.shape[2:]
    if sets == 1:
        row = rows.squeeze(2).gather(2, (slots // n).unsqueeze(-1).expand(*slots.shape, rank))  # [S, H, k, r]
        column = columns.squeeze(2).gather(2, (slots % n).unsqueeze(-1).expand(*slots.shape, rank))
        return ((row @ core[:, 0, 0]) * column).sum(-1)
    block = slots // n**2
    row_places = (block // sets) * n + slots // n % n
    column_places = (block % sets) * n + slots % n
    row = rows.flatten(2, 3).gather(2, row_places.unsqueeze(-1).expand(*slots.shape, rank))  # [S, H, k, r]
    column = columns.flatten(2, 3).gather(2, column_places.unsqueeze(-1).expand(*slots.shape, rank))
    cores = core.flatten(1, 2)  # [H, h * h, r, r]
    every = torch.einsum("shkr,hbrq,shkq->shkb", row, cores, column)  # [S, H, k, h * h]
    return every.gather(-1, block.unsqueeze(-1)).squeeze(-1)


def _check(
    row_scores: torch.Tensor,
    column_scores: torch.Tensor,
    core: torch.Tensor,
    row_vector: torch.Tensor,
    column_vector: torch.Tensor,
    k: int,
    side: int,
) -> None:
    if row_scores.dim() < 5 or row_scores.shape != column_scores.shape:
        raise ValueError(
            f"row_scores is {tuple(row_scores.shape)} and column_scores {tuple(column_scores.shape)}; expected equal shapes "
            "[..., heads, sets, keys, rank]."
        )
    heads, sets, n, rank = row_scores.shape[-4:]
    for name, tensor, shape in (
        ("core", core, (heads, sets, sets, rank, rank)),
        ("row_vector", row_vector, (heads, sets, sets, rank)),
        ("column_vector", column_vector, (heads, sets, sets, rank)),
    ):
        if tensor.shape != shape:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)}; expected {shape}, as the scores have heads, sets and rank."
            )
    if not 1 <= side <= n:
        raise ValueError(f"side is {side}; expected 1 <= side <= n = {n}.")
    if not 1 <= k <= sets**2 * side**2:
        raise ValueError(f"k is {k}; expected 1 <= k <= {sets**2 * side**2}, the pairs that the first stage keeps.")

"""Matching of the attention heads of two layers in whole groups: a key/value head with the query heads that share it."""

import torch


def match_heads(
    source: dict[str, torch.Tensor], target: dict[str, torch.Tensor], num_key_value_heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the permutation of heads with the least total distance that keeps query heads with their key/value head.

    Groups are matched by the Frobenius distance of their key, value and query heads, and query heads are matched only
    within their group. Rows within a head are not permuted, so that rotary pairs and dot products stay as they are.

    Args:
        source: Projections by role, for G key/value heads: `query` [H d, D], `key` [G d, D] and `value` [G d, D].
        target: Projections of the other layer, with the same roles and shapes.
        num_key_value_heads: G, number of key/value heads.
        head_dim: d, width of a head.

    Returns:
        For each row of the target's queries [H d], and for each row of its keys and values [G d], the index of the
        source row that takes its place.
    """
    from scipy.optimize import linear_sum_assignment

    groups = num_key_value_heads

    def heads(values: torch.Tensor) -> torch.Tensor:
        return values.view(groups, -1, head_dim * values.shape[-1])  # [G, heads per group, d D]

    cost = sum(
        torch.cdist(heads(source[role])[:, 0], heads(target[role])[:, 0]) for role in ("key", "value")
    )  # [G, G]
    assert isinstance(cost, torch.Tensor)
    cost = cost.cpu()
    source_queries, target_queries = heads(source["query"]), heads(target["query"])
    within: dict[tuple[int, int], torch.Tensor] = {}
    for one in range(groups):
        for other in range(groups):
            distances = torch.cdist(source_queries[one], target_queries[other]).cpu()
            rows, columns = map(torch.from_numpy, linear_sum_assignment(distances.numpy()))
            cost[one, other] += distances[rows, columns].sum()
            within[one, other] = rows[columns.argsort()]  # source head for each query head of the target
    source_groups, target_groups = linear_sum_assignment(cost.numpy())
    source_of = dict(zip(target_groups.tolist(), source_groups.tolist(), strict=True))

    per_group = source_queries.shape[1]
    group_order = torch.tensor([source_of[group] for group in range(groups)])
    head_order = torch.cat([source_of[group] * per_group + within[source_of[group], group] for group in range(groups)])
    device = source["query"].device
    return _rows_of(head_order, head_dim).to(device), _rows_of(group_order, head_dim).to(device)


def _rows_of(heads: torch.Tensor, head_dim: int) -> torch.Tensor:
    return (heads[:, None] * head_dim + torch.arange(head_dim)).flatten()

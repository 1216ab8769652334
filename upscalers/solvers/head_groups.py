"""Matching whole attention heads of two layers, with the key/value head that several query heads share."""

import torch


def match_heads(
    source: dict[str, torch.Tensor], target: dict[str, torch.Tensor], num_key_value_heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The permutation of heads with the least total distance that keeps query heads with their key/value head.

    Groups are matched by the Frobenius distance of their key, value and query heads, query heads only within their group;
    no head is permuted inside, so that rotary pairs and dot products stay as they are.

    Args:
        source: Roles `query` [H d, D], `key` [G d, D] and `value` [G d, D], for G key/value heads.
        target: The same of the other layer.
        num_key_value_heads: G.
        head_dim: d.

    Returns:
        For each row of the target's queries [H d], and of its keys and values [G d], the source row that stands for it.
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
            within[one, other] = rows[columns.argsort()]  # for each query head of the target its source
    source_groups, target_groups = linear_sum_assignment(cost.numpy())
    source_of = dict(zip(target_groups.tolist(), source_groups.tolist(), strict=True))

    per_group = source_queries.shape[1]
    group_order = torch.tensor([source_of[group] for group in range(groups)])
    head_order = torch.cat([source_of[group] * per_group + within[source_of[group], group] for group in range(groups)])
    device = source["query"].device
    return _rows_of(head_order, head_dim).to(device), _rows_of(group_order, head_dim).to(device)


def _rows_of(heads: torch.Tensor, head_dim: int) -> torch.Tensor:
    return (heads[:, None] * head_dim + torch.arange(head_dim)).flatten()

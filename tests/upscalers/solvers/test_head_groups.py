"""Heads are matched whole, query heads with their key/value head."""

import itertools

import pytest
import torch

from upscalers.solvers.head_groups import match_heads

GROUPS, PER_GROUP, HEAD_DIM, WIDTH = 4, 3, 4, 20


def heads(seed: int = 0, groups: int = GROUPS, per_group: int = PER_GROUP) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {"query": groups * per_group, "key": groups, "value": groups}
    return {
        role: torch.randn(count * HEAD_DIM, WIDTH, generator=generator, dtype=torch.float64)
        for role, count in sizes.items()
    }


def reordered(matrix: torch.Tensor, order: list[int]) -> torch.Tensor:
    return torch.cat([matrix[head * HEAD_DIM : (head + 1) * HEAD_DIM] for head in order])


def shuffled(source: dict[str, torch.Tensor], group_order: list[int], inside: list[list[int]], noise: float = 0.0):
    """Groups in another order, and the query heads inside each new group in an order of their own."""
    queries = [group * PER_GROUP + head for group, order in zip(group_order, inside, strict=True) for head in order]
    orders = {"query": queries, "key": group_order, "value": group_order}
    generator = torch.Generator().manual_seed(9)
    target = {role: reordered(source[role], order) for role, order in orders.items()}
    return {
        role: matrix + noise * torch.randn(matrix.shape, generator=generator, dtype=matrix.dtype)
        for role, matrix in target.items()
    }


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_groups_and_the_heads_inside_them_are_found_again(noise):
    source = heads()
    target = shuffled(source, [2, 0, 3, 1], [[1, 0, 2], [0, 1, 2], [2, 1, 0], [2, 0, 1]], noise)
    queries, keys = match_heads(source, target, GROUPS, HEAD_DIM)
    clean = shuffled(source, [2, 0, 3, 1], [[1, 0, 2], [0, 1, 2], [2, 1, 0], [2, 0, 1]])
    assert torch.equal(source["query"][queries], clean["query"])
    assert torch.equal(source["key"][keys], clean["key"])
    assert torch.equal(source["value"][keys], clean["value"])


def test_a_query_head_stays_with_its_key_value_head_even_where_another_groups_fits_it_better():
    source = heads()
    target = {role: matrix.clone() for role, matrix in source.items()}
    one, other = slice(0, HEAD_DIM), slice(PER_GROUP * HEAD_DIM, (PER_GROUP + 1) * HEAD_DIM)
    target["query"][one], target["query"][other] = source["query"][other], source["query"][one]
    queries, keys = match_heads(source, target, GROUPS, HEAD_DIM)
    assert torch.equal(keys, torch.arange(GROUPS * HEAD_DIM))
    assert torch.equal(queries // (PER_GROUP * HEAD_DIM), torch.arange(len(queries)) // (PER_GROUP * HEAD_DIM))


def test_rows_inside_a_head_keep_their_order():
    """Whatever the rows look like: rotary embeddings pair row i with row i + d / 2."""
    source = heads()
    target = {role: matrix.view(-1, HEAD_DIM, WIDTH).flip(1).reshape(-1, WIDTH) for role, matrix in source.items()}
    for rows in match_heads(source, target, GROUPS, HEAD_DIM):
        starts = rows[::HEAD_DIM]
        assert torch.equal(rows, (starts[:, None] + torch.arange(HEAD_DIM)).flatten())
        assert (starts % HEAD_DIM == 0).all()
        assert torch.equal(rows.sort().values, torch.arange(len(rows)))


def test_the_total_distance_of_keys_values_and_queries_is_the_least_there_is():
    groups, per_group = 3, 2
    source, target = heads(3, groups, per_group), heads(4, groups, per_group)

    def distance(role: str, one: int, other: int) -> float:
        rows = [slice(head * HEAD_DIM, (head + 1) * HEAD_DIM) for head in (one, other)]
        return (source[role][rows[0]] - target[role][rows[1]]).norm().item()

    def total(group_of, inside) -> float:
        kept = sum(distance(role, group_of[g], g) for g in range(groups) for role in ("key", "value"))
        return kept + sum(
            distance("query", group_of[g] * per_group + inside[g][h], g * per_group + h)
            for g in range(groups)
            for h in range(per_group)
        )

    orders = list(itertools.permutations(range(per_group)))
    best = min(
        ((p, i) for p in itertools.permutations(range(groups)) for i in itertools.product(orders, repeat=groups)),
        key=lambda choice: total(*choice),
    )
    queries, keys = match_heads(source, target, groups, HEAD_DIM)
    assert tuple((keys[::HEAD_DIM] // HEAD_DIM).tolist()) == best[0]
    heads_of = [best[0][g] * per_group + best[1][g][h] for g in range(groups) for h in range(per_group)]
    assert (queries[::HEAD_DIM] // HEAD_DIM).tolist() == heads_of


@pytest.mark.parametrize(("groups", "per_group"), [(1, 6), (6, 1), (1, 1)])
def test_one_group_for_all_heads_and_one_for_each_are_matched_alike(groups, per_group):
    source = heads(5, groups, per_group)
    order = torch.randperm(groups * per_group, generator=torch.Generator().manual_seed(0)).tolist()
    group_order = order if per_group == 1 else [0]
    target = {role: reordered(source[role], order if role == "query" else group_order) for role in source}
    queries, keys = match_heads(source, target, groups, HEAD_DIM)
    assert torch.equal(source["query"][queries], target["query"])
    assert torch.equal(source["value"][keys], target["value"])

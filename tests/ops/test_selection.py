"""The k largest by groups are those of one `topk` over all columns."""

import pytest
import torch

from midus_hf.ops.product_key import selection
from midus_hf.ops.product_key.selection import largest


@pytest.mark.parametrize("sign", [-1, 1], ids=["below-zero", "above-zero"])
@pytest.mark.parametrize(("n", "k"), [(64, 4), (65, 4), (71, 3), (100, 1), (130, 8), (300, 5)])
def test_groups_find_what_one_selection_finds(n, k, sign):
    """Below zero too, where padding must not be chosen; 65, 71, 130 and 300 columns leave a group short."""
    generator = torch.Generator().manual_seed(n)
    rows = selection._FEW_ELEMENTS // n + 1
    scores = sign * torch.stack([torch.randperm(n, generator=generator) for _ in range(rows)]).float() - sign / 2
    assert selection._group_size(n, k) > 1 and scores.numel() >= selection._FEW_ELEMENTS
    values, places = largest(scores, k)
    expected_values, expected_places = scores.topk(k, dim=-1)
    assert torch.equal(values, expected_values) and torch.equal(places, expected_places)


@pytest.mark.parametrize(("n", "k"), [(25, 1), (64, 4), (65, 4), (1024, 32), (64, 40)])
def test_of_equal_elements_each_is_chosen_once(n, k):
    scores = (
        torch.randn(1 + selection._FEW_ELEMENTS // n, n, generator=torch.Generator().manual_seed(0)).mul(2).round()
    )
    values, places = largest(scores, k)
    assert torch.equal(values, scores.topk(k).values) and torch.equal(scores.gather(-1, places), values)
    assert all(len(set(row)) == k for row in places[:50].tolist())


def test_few_elements_and_few_columns_are_selected_at_once():
    scores = torch.randn(3, 2, 64)
    assert all(map(torch.equal, largest(scores, 4), scores.topk(4, dim=-1)))
    assert selection._group_size(16, 4) == 1

"""Retrieval by product keys and by flat keys against a search through all slots, and the largest by groups against one `topk`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.loops import slot_scores

from midus_hf.ops import flat_key_topk, product_key_topk
from midus_hf.ops.product_key import op as selection


def integers(*shape: int, largest: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Whole numbers, so that every sum is exact and scores can be compared without a tolerance."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-largest, largest + 1, shape, generator=generator).to(dtype)


@settings(max_examples=150)
@given(
    n=st.integers(1, 9),
    k_part=st.floats(0, 1),
    half=st.integers(1, 4),
    heads=st.integers(1, 3),
    tokens=st.integers(0, 4),
    largest=st.sampled_from([0, 1, 3, 500]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**31),
)
def test_two_stages_find_the_best_of_all_slots(n, k_part, half, heads, tokens, largest, dtype, seed):
    k = 1 + round(k_part * (n - 1))
    query = integers(tokens, heads, 2 * half, largest=largest, seed=seed, dtype=dtype)
    row_keys = integers(heads, n, half, largest=largest, seed=seed + 1, dtype=dtype)
    column_keys = integers(heads, n, half, largest=largest, seed=seed + 2, dtype=dtype)

    scores, slots = product_key_topk(query, row_keys, column_keys, k)

    assert scores.shape == slots.shape == (tokens, heads, k)
    assert scores.dtype == dtype and slots.dtype == torch.int64
    for t in range(tokens):
        for h in range(heads):
            of_slots = slot_scores(*(tensor.double() for tensor in (query[t, h], row_keys[h], column_keys[h])))
            every = [score.item() for score in of_slots]
            result, found_scores = slots[t, h].tolist(), scores[t, h].tolist()
            assert found_scores == sorted(every, reverse=True)[:k]
            assert len(set(result)) == k and [every[slot] for slot in result] == found_scores
            if len(set(every)) == n * n:
                assert result == sorted(range(n * n), key=lambda slot: -every[slot])[:k]


def test_flat_keys_are_compared_with_every_query():
    generator = torch.Generator().manual_seed(0)
    query, keys = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((2, 5, 3, 4), (3, 30, 4))
    )
    query.requires_grad_(), keys.requires_grad_()
    scores, slots = flat_key_topk(query, keys, 6)
    every = torch.einsum("bthd,hsd->bths", query, keys)
    torch.testing.assert_close(scores, every.sort(dim=-1, descending=True).values[..., :6])
    torch.testing.assert_close(every.gather(-1, slots), scores)
    assert torch.autograd.gradcheck(lambda q, k: flat_key_topk(q, k, 6)[0], (query, keys))


@pytest.mark.parametrize("sign", [-1, 1], ids=["below-zero", "above-zero"])
@pytest.mark.parametrize(("n", "k"), [(64, 4), (65, 4), (71, 3), (100, 1), (130, 8), (300, 5)])
def test_groups_find_what_one_selection_finds(n, k, sign):
    """Below zero too, where padding must not be chosen; 65, 71, 130 and 300 columns leave a group short."""
    generator = torch.Generator().manual_seed(n)
    rows = selection._FEW_ELEMENTS // n + 1
    scores = sign * torch.stack([torch.randperm(n, generator=generator) for _ in range(rows)]).float() - sign / 2
    assert selection._group_size(n, k) > 1 and scores.numel() >= selection._FEW_ELEMENTS
    values, places = selection.largest(scores, k)
    expected_values, expected_places = scores.topk(k, dim=-1)
    assert torch.equal(values, expected_values) and torch.equal(places, expected_places)


@pytest.mark.parametrize(("n", "k"), [(25, 1), (64, 4), (65, 4), (1024, 32), (64, 40)])
def test_equal_elements_are_each_chosen_once(n, k):
    rows, generator = 1 + selection._FEW_ELEMENTS // n, torch.Generator().manual_seed(0)
    scores = torch.randn(rows, n, generator=generator).mul(2).round()
    few = scores[:3, :16]  # selected at once
    assert selection._group_size(16, 4) == 1 and all(map(torch.equal, selection.largest(few, 1), few.topk(1)))
    values, places = selection.largest(scores, k)
    assert torch.equal(values, scores.topk(k).values) and torch.equal(scores.gather(-1, places), values)
    assert all(len(set(row)) == k for row in places[:50].tolist())

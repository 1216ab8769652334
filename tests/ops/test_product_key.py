"""Retrieval by product keys and by flat keys, and head-wise memory, against loops over all slots; the largest by groups."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from midus_hf.ops import flat_key_topk, headwise_memory, product_key_topk
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
    assert scores.dtype == dtype
    assert slots.dtype == torch.int64
    for t in range(tokens):
        for h in range(heads):
            of_slots = slot_scores(*(tensor.double() for tensor in (query[t, h], row_keys[h], column_keys[h])))
            every = [score.item() for score in of_slots]
            result, found_scores = slots[t, h].tolist(), scores[t, h].tolist()
            assert found_scores == sorted(every, reverse=True)[:k]
            assert len(set(result)) == k
            assert [every[slot] for slot in result] == found_scores
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
    assert selection._group_size(n, k) > 1
    assert scores.numel() >= selection._FEW_ELEMENTS
    values, places = selection.largest(scores, k)
    expected_values, expected_places = scores.topk(k, dim=-1)
    assert torch.equal(values, expected_values)
    assert torch.equal(places, expected_places)


@pytest.mark.parametrize(("n", "k"), [(25, 1), (64, 4), (65, 4), (1024, 32), (64, 40)])
def test_equal_elements_are_each_chosen_once(n, k):
    rows, generator = 1 + selection._FEW_ELEMENTS // n, torch.Generator().manual_seed(0)
    scores = torch.randn(rows, n, generator=generator).mul(2).round()
    few = scores[:3, :16]  # selected at once
    assert selection._group_size(16, 4) == 1
    assert all(map(torch.equal, selection.largest(few, 1), few.topk(1)))
    values, places = selection.largest(scores, k)
    assert torch.equal(values, scores.topk(k).values)
    assert torch.equal(scores.gather(-1, places), values)
    assert all(len(set(row)) == k for row in places[:50].tolist())


def slot_scores(query: torch.Tensor, row_keys: torch.Tensor, column_keys: torch.Tensor) -> list[torch.Tensor]:
    """The scores of all n * n slots for one token and head (equations 11 and 13); slot `i * n + j` pairs i with j."""
    rows, columns = query.split(len(query) // 2)
    return [
        torch.dot(rows, row_key) + torch.dot(columns, column_key) for row_key in row_keys for column_key in column_keys
    ]


def best_slots(scores: list[torch.Tensor], k: int) -> list[int]:
    """The k slots of highest score, best first; of equal ones, the one that comes first."""
    return sorted(range(len(scores)), key=lambda slot: -scores[slot].item())[:k]


def headwise_memory_by_loops(query, row_keys, column_keys, value_bank, value_transform, k: int) -> torch.Tensor:
    """Return the output `[T, H, v]` for a query `[T, H, d]`; other shapes as in `midus_hf.ops.midus_hml.op`."""
    outputs = []
    for token in query:
        for head, queries in enumerate(token):
            scores = slot_scores(queries, row_keys[head], column_keys[head])
            slots = best_slots(scores, k)
            weights = torch.stack([scores[slot] for slot in slots]).softmax(0)
            retrieved = sum(weight * value_bank[slot] for weight, slot in zip(weights, slots, strict=True))  # eq. 16
            outputs.append(value_transform[head] @ retrieved)  # eq. 16 and 17
    return torch.stack(outputs).view(*query.shape[:2], -1)


NAMES = ("query", "row_keys", "column_keys", "value_bank", "value_transform")


def inputs(tokens=5, heads=3, half=4, n=6, width=5, seed=0, dtype=torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((tokens, heads, 2 * half), (heads, n, half), (heads, n, half), (n * n, width), (heads, width, width))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("sizes", [{}, {"tokens": 40, "n": 3}, {"half": 1, "width": 1, "n": 7}], ids=str)
def test_output_and_gradients_equal_loops(sizes, k):
    arguments = [argument.requires_grad_() for argument in inputs(**sizes)]
    output, by_loops = headwise_memory(*arguments, k), headwise_memory_by_loops(*arguments, k)
    torch.testing.assert_close(output, by_loops, rtol=1e-12, atol=1e-13)
    along = torch.randn(output.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    both = (torch.autograd.grad(made, arguments, along) for made in (output, by_loops))
    for name, gradient, expected in zip(NAMES, *both, strict=True):
        assert k == 1 or expected.abs().max() > 0, f"the gradient of {name} is zero and shows nothing"
        torch.testing.assert_close(
            gradient, expected, rtol=1e-11, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_reference_can_be_differentiated_twice():
    arguments = [argument.requires_grad_() for argument in inputs(tokens=3, heads=2, half=2, n=4, width=3)]
    assert torch.autograd.gradgradcheck(lambda *tensors: headwise_memory(*tensors, 3, backend="reference"), arguments)

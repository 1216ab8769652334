"""Tucker-decomposed retrieval against all pairs of keys scored by loops, and the leading vectors of cores against a decomposition."""

import itertools

import pytest
import torch

from midus_hf.ops import tucker_topk as op
from midus_hf.ops.tucker_topk import leading_vectors, reference, select, slot_scores, tucker_topk


def drawn(heads=2, sets=2, n=5, rank=2, tokens=3, seed=0):
    """Scores of rows and columns, cores with positive entries, and their leading vectors; float64."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.randn(2, tokens, heads, sets, n, rank, dtype=torch.float64, generator=generator)
    core = torch.rand(heads, sets, sets, rank, rank, dtype=torch.float64, generator=generator)
    vectors = leading_vectors(core, torch.ones(heads, sets, sets, rank, dtype=torch.float64))
    return rows, columns, core, *vectors


def by_loops(rows, columns, core, k):
    """Equation 11, pair by pair: the k best scores and slots of each token and head."""
    tokens, heads, sets, n, rank = rows.shape
    scores, slots = [], []
    for token, head in itertools.product(range(tokens), range(heads)):
        found = []
        for a, b, i, j in itertools.product(range(sets), range(sets), range(n), range(n)):
            score = sum(
                rows[token, head, a, i, p].item()
                * core[head, a, b, p, q].item()
                * columns[token, head, b, j, q].item()
                for p, q in itertools.product(range(rank), range(rank))
            )
            found.append((score, ((a * sets + b) * n + i) * n + j))
        best = sorted(found, reverse=True)[:k]
        scores.append([score for score, _ in best])
        slots.append([slot for _, slot in best])
    shape = (tokens, heads, k)
    return torch.tensor(scores, dtype=torch.float64).view(shape), torch.tensor(slots).view(shape)


@pytest.mark.parametrize("sets", [1, 2])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_where_all_keys_are_kept_it_finds_what_loops_find(rank, sets):
    rows, columns, core, left, right = drawn(rank=rank, sets=sets)
    scores, slots = tucker_topk(rows, columns, core, left, right, k=7, side=5)
    expected_scores, expected_slots = by_loops(rows, columns, core, 7)
    torch.testing.assert_close(scores, expected_scores, rtol=1e-12, atol=1e-12)
    assert torch.equal(slots, expected_slots)
    torch.testing.assert_close(reference(rows, columns, core, 7)[0], expected_scores, rtol=1e-12, atol=1e-12)


def test_with_rank_one_and_positive_scores_as_many_keys_as_slots_suffice():
    rows, columns, core, left, right = drawn(rank=1, sets=2, n=9)
    rows, columns = rows.abs(), columns.abs()
    scores, slots = tucker_topk(rows, columns, core, left, right, k=4, side=4)
    expected_scores, expected_slots = by_loops(rows, columns, core, 4)
    torch.testing.assert_close(scores, expected_scores, rtol=1e-12, atol=1e-12)
    assert torch.equal(slots, expected_slots)


def test_two_stages_find_half_of_the_best_of_random_keys():
    """Measured over five seeds: 0.45 to 0.51 of the 32 best of 128 * 128, with 0.85 to 0.87 of their scores, and no more with 64 keys
    of a side kept: the others are pairs of two keys with negative leading scores, which no rank-1 stage can find.
    """
    rows, columns, core, left, right = drawn(heads=1, sets=1, n=128, tokens=64)
    scores, slots = tucker_topk(rows, columns, core, left, right, k=32, side=32)
    best_scores, best = reference(rows, columns, core, 32)
    recall = (slots[..., :, None] == best[..., None, :]).any(-1).double().mean().item()
    share = (scores.sum() / best_scores.sum()).item()
    assert recall > 0.4 and share > 0.8, (recall, share)


def test_gradients_are_those_of_the_scores_of_the_chosen_slots():
    rows, columns, core, left, right = drawn(heads=1, tokens=2)
    slots = select(rows, columns, core, left, right, k=3, side=3)
    inputs = [tensor.clone().requires_grad_() for tensor in (rows, columns, core)]
    assert torch.autograd.gradcheck(lambda *given: slot_scores(*given, slots), inputs)
    scores, found = tucker_topk(*inputs, left, right, k=3, side=3)
    assert torch.equal(found, slots)
    torch.testing.assert_close(scores, slot_scores(*inputs, slots), rtol=0, atol=0)


def test_many_tokens_are_chosen_for_in_stretches(monkeypatch):
    given = drawn(tokens=7)
    whole = tucker_topk(*given, k=4, side=3)
    monkeypatch.setattr(op, "_MOST_SCORES", 2 * 4 * 9 * 2)
    for found, expected in zip(tucker_topk(*given, k=4, side=3), whole, strict=True):
        assert torch.equal(found, expected)


def test_leading_dimensions_are_kept():
    rows, columns, core, left, right = drawn(tokens=6)
    flat = tucker_topk(rows, columns, core, left, right, k=4, side=3)
    shaped = tucker_topk(rows.unflatten(0, (2, 3)), columns.unflatten(0, (2, 3)), core, left, right, k=4, side=3)
    assert all(torch.equal(a, b.flatten(0, 1)) for a, b in zip(flat, shaped, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"columns": torch.zeros(3, 2, 2, 4, 2)}, r"column_scores \(3, 2, 2, 4, 2\); expected equal shapes"),
        ({"core": torch.zeros(2, 2, 2, 2, 3)}, r"core is \(2, 2, 2, 2, 3\); expected \(2, 2, 2, 2, 2\)"),
        ({"left": torch.zeros(2, 2, 2, 3)}, r"row_vector is \(2, 2, 2, 3\); expected \(2, 2, 2, 2\)"),
        ({"right": torch.zeros(2, 2, 2)}, r"column_vector is \(2, 2, 2\); expected"),
        ({"side": 6}, "side is 6; expected 1 <= side <= n = 5"),
        ({"k": 37}, "k is 37; expected 1 <= k <= 36, the pairs that the first stage keeps"),
    ],
)  # fmt: skip
def test_shapes_and_counts_that_do_not_fit_are_refused(change, message):
    given = (
        dict(zip(("rows", "columns", "core", "left", "right"), drawn(), strict=True)) | {"k": 4, "side": 3} | change
    )
    with pytest.raises(ValueError, match=message):
        tucker_topk(*given.values())


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_leading_vectors_are_those_of_a_singular_value_decomposition(rank):
    cores = torch.rand(20, rank, rank, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    left, right = leading_vectors(cores, torch.ones(20, rank))
    u, _, vh = torch.linalg.svd(cores)
    sign = (left * u[..., 0]).sum(-1, keepdim=True).sign()
    torch.testing.assert_close(left, u[..., 0] * sign, rtol=0, atol=1e-9)
    torch.testing.assert_close(right, vh[..., 0, :] * sign, rtol=0, atol=1e-9)


def test_signs_last_along_a_path_of_cores():
    """From a core to its negative, past a rotation: each pair of vectors lies on the side of the one before."""
    left = torch.tensor([1.0, 1.0], dtype=torch.float64) / 2**0.5
    for angle in torch.linspace(0, 3.2, 65, dtype=torch.float64):
        turn = torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])
        core = turn @ torch.diag(torch.tensor([2.0, 0.3], dtype=torch.float64))
        new, right = leading_vectors(core, left)
        assert new @ left > 0.99 or angle == 0
        assert new @ core @ right == pytest.approx(2.0, rel=1e-9)
        left = new


def test_a_core_of_zeros_or_without_a_leading_value_gives_numbers():
    for core in (torch.zeros(2, 2), torch.eye(2)):
        left, right = leading_vectors(core, torch.tensor([0.6, 0.8]))
        assert left.isfinite().all() and right.isfinite().all()
    assert torch.allclose(left, torch.tensor([0.6, 0.8]))

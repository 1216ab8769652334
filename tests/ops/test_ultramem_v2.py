"""Tucker-decomposed retrieval against two stages by loops, and the leading vectors of cores against a decomposition."""

import itertools

import pytest
import torch

from midus_hf.ops import ultramem_v2 as op
from midus_hf.ops.ultramem_v2 import leading_vectors, reference_tucker_topk, select, slot_scores, tucker_topk


def drawn(heads=2, n=5, rank=2, tokens=3, seed=0):
    """Scores of rows and columns, cores with positive entries, and their leading vectors; float64."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.randn(2, tokens, heads, n, rank, dtype=torch.float64, generator=generator)
    core = torch.rand(heads, rank, rank, dtype=torch.float64, generator=generator)
    vectors = leading_vectors(core, torch.ones(heads, rank, dtype=torch.float64))
    return rows, columns, core, *vectors


def two_stages_by_loops(rows, columns, core, k, side):
    """Rows and columns kept by the vectors of a decomposition of the core, and the best of their pairs."""
    tokens, heads, n, _ = rows.shape
    u, _, vh = torch.linalg.svd(core)
    found_scores, found_slots = [], []
    for token, head in itertools.product(range(tokens), range(heads)):
        left, right = u[head, :, 0], vh[head, 0]
        sign = left.sum().sign()  # entries of the core are positive, so all of its leading vectors' have one sign
        kept_rows = sorted(range(n), key=lambda i: -(rows[token, head, i] @ left * sign).item())[:side]
        kept_columns = sorted(range(n), key=lambda j: -(columns[token, head, j] @ right * sign).item())[:side]
        pairs = itertools.product(kept_rows, kept_columns)
        results = [((rows[token, head, i] @ core[head] @ columns[token, head, j]).item(), i * n + j) for i, j in pairs]
        best = sorted(results, reverse=True)[:k]
        found_scores.append([score for score, _ in best])
        found_slots.append([slot for _, slot in best])
    shape = (tokens, heads, k)
    return torch.tensor(found_scores, dtype=torch.float64).view(shape), torch.tensor(found_slots).view(shape)


@pytest.mark.parametrize(("rank", "side"), [(1, 2), (2, 1), (2, 3), (3, 2), (3, 5)])
def test_core_vectors_select_the_kept_keys(rank, side):
    rows, columns, core, left, right = drawn(rank=rank, tokens=4)
    k = min(7, side**2)
    expected_scores, expected_slots = two_stages_by_loops(rows, columns, core, k, side)
    for body in (tucker_topk, reference_tucker_topk):
        scores, slots = body(rows, columns, core, left, right, k=k, side=side)
        torch.testing.assert_close(scores, expected_scores, rtol=1e-12, atol=1e-12)
        assert torch.equal(slots, expected_slots)
    of_all = two_stages_by_loops(rows, columns, core, k, 5)[1]
    assert side >= 3 or not torch.equal(slots, of_all)  # the first stage matters here


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_gradients_are_those_of_the_chosen_scores(rank):
    rows, columns, core, left, right = drawn(rank=rank, tokens=2)
    slots = select(rows, columns, core, left, right, k=3, side=3)
    inputs = [tensor.clone().requires_grad_() for tensor in (rows, columns, core)]
    assert torch.autograd.gradcheck(lambda *arguments: slot_scores(*arguments, slots), inputs)
    scores, result = tucker_topk(*inputs, left, right, k=3, side=3)
    assert torch.equal(result, slots)
    torch.testing.assert_close(scores, slot_scores(*inputs, slots), rtol=0, atol=0)


@pytest.mark.parametrize("leading", [(0,), (2, 0), (2, 3)], ids=str)
def test_leading_shape_is_a_batch_of_tokens(leading):
    rows, columns, *tables = drawn(tokens=6)
    flat, count = tucker_topk(rows, columns, *tables, k=4, side=3), torch.Size(leading).numel()
    shaped = (scores[:count].reshape(*leading, *scores.shape[1:]) for scores in (rows, columns))
    for actual, expected in zip(tucker_topk(*shaped, *tables, k=4, side=3), flat, strict=True):
        assert torch.equal(actual, expected[:count].view(*leading, 2, 4))


def test_many_tokens_are_selected_in_stretches(monkeypatch):
    arguments = drawn(tokens=7)
    whole = tucker_topk(*arguments, k=4, side=3)
    monkeypatch.setattr(op, "_MAX_SCORES", 2 * 9 * 2)
    for actual, expected in zip(tucker_topk(*arguments, k=4, side=3), whole, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_keep_their_dtype(dtype):
    rows, columns, core, left, right = drawn()
    scores, slots = tucker_topk(rows.to(dtype), columns.to(dtype), core, left, right, k=4, side=3)
    assert scores.dtype == dtype
    assert slots.dtype == torch.int64
    exact = slot_scores(rows, columns, core, slots)
    torch.testing.assert_close(scores.double(), exact, rtol=0, atol=0.05 if dtype == torch.bfloat16 else 1e-5)


def test_leading_vectors_equal_those_of_an_svd():
    """Also where the second singular value is near to the first; with the sign of the previous vectors."""
    left, right = torch.linalg.qr(torch.randn(2, 20, 3, 3, generator=torch.Generator().manual_seed(0)).double())[0]
    cores = left * torch.tensor([1.0, 0.95, 0.5]) @ right.mT
    for sign in (1, -1):
        expected = sign * left[..., 0], sign * right[..., 0]
        torch.testing.assert_close(leading_vectors(cores, expected[0]), expected, rtol=0, atol=1e-9)


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


@pytest.mark.parametrize(
    "core",
    [torch.zeros(2, 2), torch.eye(2), torch.tensor([[0.0, 3.0], [0.0, 0.0]])],
    ids=["zeros", "eye", "nilpotent"],
)
def test_core_without_leading_value_gives_numbers(core):
    before = torch.tensor([0.6, 0.8])
    left, right = leading_vectors(core, before)
    assert left.norm().item() == pytest.approx(1)
    assert left @ before > 0
    assert right.norm().item() == pytest.approx(1 if core.any() else 0)
    assert (left @ core @ right).item() == pytest.approx(torch.linalg.matrix_norm(core, 2).item())
    assert leading_vectors(torch.tensor([[0.2, 0.9], [0.4, 0.3]]), left)[0].norm().item() == pytest.approx(1)


def test_vectors_recover_after_rotated_cores():
    left = torch.tensor([1.0, 0.0])
    for second in (1.0, 1.01, 1.1, 1.5):
        left, right = leading_vectors(torch.diag(torch.tensor([1.0, second])), left)
    assert torch.equal(left.abs(), torch.tensor([0.0, 1.0]))
    assert torch.equal(left, right)


def test_repeated_vectors_are_the_same():
    """Activation checkpointing repeats a pass after its vectors were kept; it must choose the same slots."""
    noise = torch.rand(8, 2, 2, generator=torch.Generator().manual_seed(0))
    core = torch.diag(torch.tensor([1.0, 0.999])) + 0.001 * noise
    result = leading_vectors(core, torch.full((8, 2), 2**-0.5))
    for again, before in zip(leading_vectors(core, result[0]), result, strict=True):
        assert torch.equal(again, before)

"""The fast bodies of selection against brute force over all n * n slots."""

import pytest
import torch
from ops.kernels.conftest import DEVICE

from midus_hf.ops import flat_key_topk, product_key_topk
from midus_hf.ops.product_key.selection import select


@pytest.fixture
def backend(body) -> str:
    return body


def chosen_sums(row_scores, column_scores, rows, columns):
    return (row_scores.gather(-1, rows) + column_scores.gather(-1, columns)).cpu()


def best_sums(row_scores, column_scores, k):
    grid = row_scores.unsqueeze(-1) + column_scores.unsqueeze(-2)
    return grid.flatten(-2).sort(dim=-1, descending=True).values[..., :k].cpu()


@pytest.mark.parametrize("levels", [None, 3], ids=["distinct", "with-ties"])
@pytest.mark.parametrize("tokens, n, k", [(5, 1, 1), (40, 7, 7), (3, 64, 4), (2, 64, 32), (1, 128, 9)])
@pytest.mark.parametrize("by_kernel", [False, True])
def test_the_best_sums_are_found_and_each_slot_once(by_kernel, tokens, n, k, levels):
    generator = torch.Generator().manual_seed(n)
    scores = torch.randn(2, tokens, n, generator=generator)
    scores = scores if levels is None else (levels * scores).round() / levels
    row_scores, column_scores = scores.to(DEVICE)
    if by_kernel:
        keys = torch.eye(n, device=DEVICE).unsqueeze(0)  # so that a query is what sub-keys score
        query = torch.cat([row_scores, column_scores], dim=-1).unsqueeze(1)
        slots = product_key_topk(query, keys, keys, k, backend="triton")[1].squeeze(1)
        rows, columns = slots // n, slots % n
    else:
        rows, columns = select(row_scores, column_scores, k)
    assert torch.equal(chosen_sums(row_scores, column_scores, rows, columns), best_sums(row_scores, column_scores, k))
    assert all(len(set(slots)) == k for slots in (rows * n + columns).tolist())


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


def test_flat_keys_are_scored_a_stretch_of_tokens_at_a_time(monkeypatch):
    query, keys = torch.randn(7, 2, 4), torch.randn(2, 10, 4)
    whole = flat_key_topk(query, keys, 3)
    monkeypatch.setitem(flat_key_topk.__globals__, "_MOST_SCORES", 2 * 10 * 3)
    for a, b in zip(flat_key_topk(query, keys, 3), whole, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "keys, k, message",
    [
        ((3, 4), 1, r"keys is \(3, 4\); expected \[heads, slots, key width\]"),
        ((2, 5, 3), 1, r"query ends in \(2, 4\); expected \(heads, key width\) = \(2, 3\)"),
        ((2, 5, 4), 6, r"k is 6; expected 1 <= k <= N = 5\. Lower k or raise N"),
    ],
)
def test_wrong_flat_keys_are_refused(keys, k, message):
    with pytest.raises(ValueError, match=message):
        flat_key_topk(torch.zeros(1, 2, 4), torch.zeros(keys), k)

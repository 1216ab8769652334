"""The fast bodies of selection against brute force over all n * n slots."""

import pytest
import torch
from ops.table import DEVICE, keyed

from midus_hf.ops import product_key_topk
from midus_hf.ops.product_key.op import select


def chosen_sums(row_scores, column_scores, rows, columns):
    return (row_scores.gather(-1, rows) + column_scores.gather(-1, columns)).cpu()


def best_sums(row_scores, column_scores, k):
    grid = row_scores.unsqueeze(-1) + column_scores.unsqueeze(-2)
    return grid.flatten(-2).sort(dim=-1, descending=True).values[..., :k].cpu()


@pytest.mark.parametrize("levels", [None, 3], ids=["distinct", "with-ties"])
@pytest.mark.parametrize("tokens, n, k", [(5, 1, 1), (40, 7, 7), (3, 64, 4), (2, 64, 32), (1, 128, 9)])
def test_the_best_sums_are_found_and_each_slot_once(body, tokens, n, k, levels):
    generator = torch.Generator().manual_seed(n)
    scores = torch.randn(2, tokens, n, generator=generator)
    scores = scores if levels is None else (levels * scores).round() / levels
    row_scores, column_scores = scores.to(DEVICE)
    if body == "torch":
        rows, columns = select(row_scores, column_scores, k)
    else:
        keys = torch.eye(n, device=DEVICE).unsqueeze(0)  # so that a query is what sub-keys score
        query = torch.cat([row_scores, column_scores], dim=-1).unsqueeze(1)
        sums, slots = (found.squeeze(1) for found in product_key_topk(query, keys, keys, k, backend=body))
        rows, columns = slots // n, slots % n
        assert torch.equal(sums.cpu(), best_sums(row_scores, column_scores, k)) and slots.dtype == torch.int64
    assert torch.equal(chosen_sums(row_scores, column_scores, rows, columns), best_sums(row_scores, column_scores, k))
    assert all(len(set(slots)) == k for slots in (rows * n + columns).tolist())


def test_slots_of_a_query_that_is_no_number_are_slots(body):
    arguments = keyed()
    arguments["query"][7, 1, 3] = float("nan")
    _, slots = product_key_topk(*arguments.values(), 4, backend=body)
    assert slots.min() >= 0 and slots.max() < 144

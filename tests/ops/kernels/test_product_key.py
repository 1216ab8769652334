"""The fast bodies of selection against brute force over all n * n slots."""

import pytest
import torch
from ops.kernels.conftest import DEVICE

from midus_hf.ops import product_key_topk
from midus_hf.ops.product_key.selection import select


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

"""The fast bodies of selection against brute force over all n * n slots."""

import pytest
import torch
from ops.laws import assert_equals_reference
from ops.table import DEVICE, OPS, keyed

from midus_hf.ops import product_key_topk
from midus_hf.ops.product_key import triton as kernels
from midus_hf.ops.product_key.op import select

OP = OPS["product keys"]


def chosen_sums(row_scores, column_scores, rows, columns):
    return (row_scores.gather(-1, rows) + column_scores.gather(-1, columns)).cpu()


def best_sums(row_scores, column_scores, k):
    grid = row_scores.unsqueeze(-1) + column_scores.unsqueeze(-2)
    return grid.flatten(-2).sort(dim=-1, descending=True).values[..., :k].cpu()


@pytest.mark.parametrize("levels", [None, 3], ids=["distinct", "with-ties"])
@pytest.mark.parametrize("tokens, n, k", [(5, 1, 1), (40, 7, 7), (3, 64, 4), (2, 64, 32), (1, 128, 9)])
def test_best_sums_are_found_and_each_slot_once(body, tokens, n, k, levels):
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
        assert torch.equal(sums.cpu(), best_sums(row_scores, column_scores, k))
        assert slots.dtype == torch.int64
    assert torch.equal(chosen_sums(row_scores, column_scores, rows, columns), best_sums(row_scores, column_scores, k))
    assert all(len(set(slots)) == k for slots in (rows * n + columns).tolist())


def test_nan_query_still_returns_valid_slots(body):
    arguments = keyed()
    arguments["query"][7, 1, 3] = float("nan")
    _, slots = product_key_topk(*arguments.values(), 4, backend=body)
    assert slots.min() >= 0
    assert slots.max() < 144


def test_many_float32_sub_keys_are_refused():
    message = "'triton', but 300 sub-keys per side are float32; expected 128 or fewer, or half"
    with pytest.raises(ValueError, match=message):
        OP.call(keyed(n=300), "triton")
    arguments, options = OP.made("n-300", dtype=torch.bfloat16)
    assert_equals_reference(OP, arguments, "triton", **options)


@pytest.mark.parametrize("half, n, k, held", [(512, 128, 8, 147_456), (256, 128, 8, 0)])
def test_sub_keys_too_large_for_kernels_run_in_pytorch(half, n, k, held):
    arguments = keyed(2, 1, half, n, torch.bfloat16).values()
    assert product_key_topk(*arguments, k)[1].shape == (2, 1, k)
    if held:
        with pytest.raises(ValueError, match=f"sub-keys are {half} wide, .* {held:,} bytes; expected 98,304 or"):
            product_key_topk(*arguments, k, backend="triton")
    else:
        assert product_key_topk(*arguments, k, backend="triton")[1].shape == (2, 1, k)


def test_sums_of_sub_keys_are_limited_in_memory(monkeypatch):
    leaves = [x.requires_grad_() for x in keyed(300, 2, 8, 16).values()]
    scores, _ = product_key_topk(*leaves, 3, backend="triton")
    kernel, grids = kernels.score_gradient_kernel, []

    class Noting:
        def __getitem__(self, grid):
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(kernels, "score_gradient_kernel", Noting())
    result = torch.autograd.grad(scores.sum(), leaves, retain_graph=True)
    monkeypatch.setattr(kernels, "_MAX_SUMS", 1)
    for one, other in zip(result, torch.autograd.grad(scores.sum(), leaves), strict=True):
        torch.testing.assert_close(one, other)
    assert grids == [(2 * 5,), (2,)]  # programs with sums of their own: for two heads, and five blocks of tokens

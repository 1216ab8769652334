"""The gradient of a bank in order: by head where heads have rows of their own, whatever the strides and the reach of indices."""

import pytest
import torch
from ops.laws import assert_close
from ops.table import DEVICE

from midus_hf.ops.gather import triton as bucket_sums
from midus_hf.ops.gather.triton import triton_bank_gradient


def given(tokens, heads, k, n, width, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(tokens, heads, width, generator=generator)
    slots = torch.randint(n, (tokens, heads, k), generator=generator, dtype=torch.int16)
    slots[: tokens // 2] = slots[0]  # hit by many
    weights = torch.rand(tokens, heads, k, generator=generator)
    return gradient.to(DEVICE, dtype), slots.to(DEVICE), weights.to(DEVICE)


def summed(gradient, slots, weights, shape):
    """One entry after the other, in float64."""
    heads = slots.shape[1]
    rows = slots.long() + (torch.arange(heads, device=DEVICE)[:, None] * shape[-2] if len(shape) == 3 else 0)
    terms = (weights.double().unsqueeze(-1) * gradient.double().unsqueeze(2)).flatten(0, 2)
    total = torch.zeros(shape, dtype=torch.float64, device=DEVICE)
    return total.flatten(0, -2).index_add_(0, rows.flatten(), terms).view(shape)


@pytest.mark.parametrize("shape", [(70, 5), (3, 70, 5)], ids=["shared-bank", "bank-per-head"])
@pytest.mark.parametrize("tokens, k", [(1, 1), (75, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_row_sums_are_equal_for_both_index_sizes(shape, tokens, k, dtype, monkeypatch):
    gradient, slots, weights = given(tokens, 3, k, 70, 5, dtype)
    shape, expected = torch.Size(shape), summed(gradient, slots, weights, shape)
    actual = triton_bank_gradient(gradient, slots, weights, shape, torch.float32)
    assert_close("bank", actual, expected, dtype)
    heads_first = gradient.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(triton_bank_gradient(heads_first, slots, weights, shape, torch.float32), actual)
    rounded = triton_bank_gradient(gradient, slots, weights, shape, dtype)
    assert rounded.dtype == dtype
    assert_close("bank", rounded, expected, dtype)
    monkeypatch.setattr(bucket_sums, "_REACH_OF_32_BITS", 0)
    assert torch.equal(triton_bank_gradient(gradient, slots, weights, shape, torch.float32), actual)


@pytest.mark.parametrize("shape", [(70, 5), (3, 70, 5)], ids=["shared-bank", "bank-per-head"])
@pytest.mark.parametrize("skewed", [False, True], ids=["even", "one-bucket"])
def test_large_buckets_are_summed_in_pieces(shape, skewed, monkeypatch):
    monkeypatch.setattr(bucket_sums, "_PIECE", 16)  # buckets have one piece, two or up to 19; what is not there is NaN
    gradient, slots, weights = given(50, 3, 2, 70, 5)
    slots = slots % 3 if skewed else slots
    first, again = (triton_bank_gradient(gradient, slots, weights, torch.Size(shape), torch.float32) for _ in range(2))
    assert_close("bank", first, summed(gradient, slots, weights, shape), torch.float32)
    assert torch.equal(first, again)

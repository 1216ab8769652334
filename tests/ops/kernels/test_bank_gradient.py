"""The gradient of a bank in order: by head where heads have rows of their own, whatever the strides and the reach of indices."""

import pytest
import torch
from ops.kernels.closeness import assert_close
from ops.kernels.conftest import DEVICE

from midus_hf.ops import row_sums_triton
from midus_hf.ops.row_sums_triton import divisor_of, triton_bank_gradient


def given(tokens, heads, k, n, width, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(tokens, heads, width, generator=generator)
    slots = torch.randint(n, (tokens, heads, k), generator=generator, dtype=torch.int16)
    slots[: tokens // 2] = slots[0]  # hit by so many that their sums take several launches
    weights = torch.rand(tokens, heads, k, generator=generator)
    return gradient.to(DEVICE, dtype), slots.to(DEVICE), weights.to(DEVICE)


def summed(gradient, slots, weights, shape):
    """One entry after the other, in float64."""
    heads = slots.shape[1]
    rows = slots.long() + (torch.arange(heads, device=DEVICE)[:, None] * shape[-2] if len(shape) == 3 else 0)
    terms = (weights.double().unsqueeze(-1) * gradient.double().unsqueeze(2)).flatten(0, 2)
    total = torch.zeros(shape, dtype=torch.float64, device=DEVICE)
    return total.flatten(0, -2).index_add_(0, rows.flatten(), terms).view(shape)


@pytest.mark.parametrize("shape", [(7, 5), (3, 7, 5)], ids=["shared-bank", "bank-a-head"])
@pytest.mark.parametrize("tokens, k", [(1, 1), (150, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_summed_alike_with_indices_of_either_size(shape, tokens, k, dtype, monkeypatch):
    gradient, slots, weights = given(tokens, 3, k, 7, 5, dtype)
    found = triton_bank_gradient(gradient, slots, weights, torch.Size(shape))
    assert_close("bank", found, summed(gradient, slots, weights, shape), dtype)
    heads_first = gradient.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(triton_bank_gradient(heads_first, slots, weights, torch.Size(shape)), found)
    monkeypatch.setattr(row_sums_triton, "_REACH_OF_32_BITS", 1)
    assert torch.equal(triton_bank_gradient(gradient, slots, weights, torch.Size(shape)), found)


@pytest.mark.parametrize("number", [1, 2, 3, 7, 12, 4095, 4096, 32769, 100003, (1 << 30) - 1])
def test_multiplying_by_the_inverse_divides(number):
    inverse, shift = divisor_of(number)
    assert 0 < inverse < 1 << 31
    most = (1 << 30) - 1
    near = {part * number + off for part in (0, 1, 2, most // number) for off in (-1, 0, 1)} | {most, most - 1}
    assert all(place * inverse >> (30 + shift) == place // number for place in near if 0 <= place <= most)

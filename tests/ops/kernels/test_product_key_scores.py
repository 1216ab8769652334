"""Kernels that find slots of product keys and their scores, against every slot's score in float64."""

import itertools
import math

import pytest
import torch
from ops.kernels.closeness import assert_close
from ops.kernels.conftest import DEVICE
from pairs import by_default, taking_turns

from midus_hf.ops import product_key_topk
from midus_hf.ops.product_key.triton import gradients

# Tokens, heads, width and number of sub-keys, and k.
SHAPES = [
    (64, 2, 32, 64, 4),  # without a mask
    (33, 3, 8, 12, 1),
    (17, 2, 33, 100, 7),
    (5, 1, 16, 300, 9),
    (70, 2, 4, 5, 5),
    (1, 2, 8, 128, 8),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def inputs(tokens=40, heads=2, half=8, n=16, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, heads, 2 * half), (heads, n, half), (heads, n, half))
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    return [(x if i == 0 else x / half**0.5).to(DEVICE, dtype) for i, x in enumerate(tensors)]


def all_scores(query, row_keys, column_keys):
    """Of every slot, `[S, H, n * n]`."""
    rows, columns = (
        torch.einsum("shp,hnp->shn", half, keys)
        for half, keys in zip(query.chunk(2, dim=-1), (row_keys, column_keys), strict=True)
    )
    return (rows.unsqueeze(-1) + columns.unsqueeze(-2)).flatten(-2)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    by_default(
        [*taking_turns(SHAPES, DTYPES), (SHAPES[2], torch.float32), (SHAPES[3], torch.bfloat16)],
        itertools.product(SHAPES, DTYPES),
    ),
    ids=str,
)
def test_slots_scores_and_gradients(shape, dtype):
    tokens, heads, half, n, k = shape
    leaves = [x.requires_grad_() for x in inputs(tokens, heads, half, n, dtype)]
    if dtype == torch.float32 and n > 128:
        with pytest.raises(
            ValueError, match="'triton', but 300 sub-keys per side are float32; expected 128 or fewer, or half"
        ):
            product_key_topk(*leaves, k, backend="triton")
        return
    scores, slots = product_key_topk(*leaves, k, backend="triton")
    every = all_scores(*(wide := [x.detach().double().requires_grad_() for x in leaves]))
    best, best_slots = every.topk(k, dim=-1)
    actual = every.gather(-1, slots)
    assert (scores.dtype, slots.dtype) == (torch.float32, torch.int64)
    assert all(len(set(row)) == k for row in slots.flatten(0, 1).tolist())
    assert (scores.diff(dim=-1) <= 0).all()
    assert torch.equal(slots, best_slots)
    torch.testing.assert_close(scores.double(), best, rtol=1e-5, atol=1e-5)
    upstream = torch.randn(scores.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    expected = torch.autograd.grad(actual, wide, upstream.double())
    for name, gradient, into in zip("query rows columns".split(), leaves, expected, strict=True):
        computed = torch.autograd.grad(scores, gradient, upstream, retain_graph=True)[0]
        assert computed.dtype == dtype
        assert_close(name, computed, into, dtype)


def test_a_query_of_any_strides_and_leading_dimensions_is_read_as_it_lies():
    query, *keys = inputs(24)
    expected = product_key_topk(query, *keys, 3, backend="triton")
    between = torch.stack([query, query + 1], dim=2)[:, :, 0]
    across = query.mT.contiguous().mT
    for queries in (between, across, query.view(2, 3, 4, 2, 16)):
        actual = product_key_topk(queries, *keys, 3, backend="triton")
        assert all(torch.equal(one.flatten(0, -3), other) for one, other in zip(actual, expected, strict=True))


def test_what_is_no_number_stays_none_and_spoils_no_other_token():
    arguments = inputs()
    before, _ = product_key_topk(*arguments, 4, backend="triton")
    arguments[0][7, 1, 3] = math.nan
    scores, slots = product_key_topk(*arguments, 4, backend="triton")
    assert scores[7, 1].isnan().any() and scores.isnan().any(-1).sum() == 1
    assert slots.min() >= 0 and slots.max() < 256
    before[7, 1] = scores[7, 1] = 0
    assert torch.equal(scores, before)


@pytest.mark.parametrize("half, n, k, held", [(512, 128, 8, 147_456), (256, 128, 8, 0)])
def test_keys_that_a_program_has_no_room_for_are_left_to_pytorch(half, n, k, held):
    arguments = inputs(2, 1, half, n)
    assert product_key_topk(*arguments, k)[1].shape == (2, 1, k)
    if held:
        message = (
            f"'triton', but sub-keys are {half} wide, of which a program would hold {held:,} bytes; expected 98,304 or"
        )
        with pytest.raises(ValueError, match=message):
            product_key_topk(*arguments, k, backend="triton")
    else:
        assert product_key_topk(*arguments, k, backend="triton")[1].shape == (2, 1, k)


def test_sums_of_sub_keys_take_no_more_memory_than_they_may(monkeypatch):
    leaves = [x.requires_grad_() for x in inputs(300, dtype=torch.float32)]
    scores, _ = product_key_topk(*leaves, 3, backend="triton")
    kernel, grids = gradients.score_gradient_kernel, []

    class Noting:
        def __getitem__(self, grid):
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(gradients, "score_gradient_kernel", Noting())
    result = torch.autograd.grad(scores.sum(), leaves, retain_graph=True)
    monkeypatch.setattr(gradients, "_MOST_SUMS", 1)
    for one, other in zip(result, torch.autograd.grad(scores.sum(), leaves), strict=True):
        torch.testing.assert_close(one, other)
    assert grids == [
        (2 * 5,),
        (2,),
    ]  # programs, each of which has sums of its own: for two heads, and five blocks of tokens

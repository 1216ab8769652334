"""Kernels that find slots of product keys and their scores: what they have room for."""

import pytest
import torch
from ops.laws import assert_equals_reference
from ops.table import OPS, keyed

from midus_hf.ops import product_key_topk
from midus_hf.ops.product_key import triton as gradients

OP = OPS["product keys"]


def test_more_sub_keys_than_float32_has_room_for_are_refused_in_it_alone():
    message = "'triton', but 300 sub-keys per side are float32; expected 128 or fewer, or half"
    with pytest.raises(ValueError, match=message):
        OP.call(keyed(n=300), "triton")
    arguments, options = OP.made("n-300", dtype=torch.bfloat16)
    assert_equals_reference(OP, arguments, "triton", **options)


@pytest.mark.parametrize("half, n, k, held", [(512, 128, 8, 147_456), (256, 128, 8, 0)])
def test_keys_that_a_program_has_no_room_for_are_left_to_pytorch(half, n, k, held):
    arguments = keyed(2, 1, half, n, torch.bfloat16).values()
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
    leaves = [x.requires_grad_() for x in keyed(300, 2, 8, 16).values()]
    scores, _ = product_key_topk(*leaves, 3, backend="triton")
    kernel, grids = gradients.score_gradient_kernel, []

    class Noting:
        def __getitem__(self, grid):
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(gradients, "score_gradient_kernel", Noting())
    result = torch.autograd.grad(scores.sum(), leaves, retain_graph=True)
    monkeypatch.setattr(gradients, "_MAX_SUMS", 1)
    for one, other in zip(result, torch.autograd.grad(scores.sum(), leaves), strict=True):
        torch.testing.assert_close(one, other)
    assert grids == [
        (2 * 5,),
        (2,),
    ]  # programs, each of which has sums of its own: for two heads, and five blocks of tokens

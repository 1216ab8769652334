"""The head-wise memory op against loops written from the paper's equations, and against finite differences."""

import pytest
import torch
from ops.loops import headwise_memory_by_loops

from midus_hf.ops import headwise_memory

NAMES = ("query", "row_keys", "column_keys", "value_bank", "value_transform")


def inputs(tokens=5, heads=3, half=4, n=6, width=5, seed=0, dtype=torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((tokens, heads, 2 * half), (heads, n, half), (heads, n, half), (n * n, width), (heads, width, width))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("sizes", [{}, {"tokens": 40, "n": 3}, {"half": 1, "width": 1, "n": 7}], ids=str)
def test_output_and_gradients_equal_loops(sizes, k):
    arguments = [argument.requires_grad_() for argument in inputs(**sizes)]
    output, by_loops = headwise_memory(*arguments, k), headwise_memory_by_loops(*arguments, k)
    torch.testing.assert_close(output, by_loops, rtol=1e-12, atol=1e-13)
    along = torch.randn(output.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    both = (torch.autograd.grad(made, arguments, along) for made in (output, by_loops))
    for name, gradient, expected in zip(NAMES, *both, strict=True):
        assert k == 1 or expected.abs().max() > 0, f"the gradient of {name} is zero and shows nothing"
        torch.testing.assert_close(
            gradient, expected, rtol=1e-11, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_reference_can_be_differentiated_twice():
    arguments = [argument.requires_grad_() for argument in inputs(tokens=3, heads=2, half=2, n=4, width=3)]
    assert torch.autograd.gradgradcheck(lambda *tensors: headwise_memory(*tensors, 3, backend="reference"), arguments)

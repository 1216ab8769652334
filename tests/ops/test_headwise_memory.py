"""The head-wise memory op against loops written from the paper's equations, and against finite differences."""

import pytest
import torch
from ops.loops import headwise_memory_by_loops

from midus_hf.ops import headwise_memory, product_key_topk

NAMES = ("query", "row_keys", "column_keys", "value_bank", "value_transform")


def inputs(tokens=5, heads=3, half=4, n=6, width=5, seed=0, dtype=torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((tokens, heads, 2 * half), (heads, n, half), (heads, n, half), (n * n, width), (heads, width, width))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


@pytest.mark.parametrize("k", [1, 2, 4, 6])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"tokens": 1},
        {"tokens": 40, "n": 3, "k_most": 3},
        {"heads": 1, "width": 8},
        {"half": 1, "width": 1, "n": 7},
    ],
    ids=str,
)
def test_output_and_every_gradient_equal_those_of_the_loops(sizes, k):
    sizes = dict(sizes)
    k = min(k, sizes.pop("k_most", k))
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


def test_the_reference_can_be_differentiated_twice():
    arguments = [argument.requires_grad_() for argument in inputs(tokens=3, heads=2, half=2, n=4, width=3)]
    assert torch.autograd.gradgradcheck(lambda *tensors: headwise_memory(*tensors, 3, backend="reference"), arguments)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("tokens", [2, 500])
def test_large_scores_overflow_nothing(tokens, gradients):
    """In float32 the exponential of a score above 88 is infinite."""
    arguments = inputs(tokens, heads=3, n=8, dtype=torch.float32)
    arguments = (200 * arguments[0], *arguments[1:])
    scores, _ = product_key_topk(*arguments[:3], 4)
    assert scores.max() > 500
    with torch.set_grad_enabled(gradients):
        output = headwise_memory(*(argument.requires_grad_(gradients) for argument in arguments), 4)
    wide = [argument.detach().double() for argument in arguments]
    torch.testing.assert_close(
        output.detach().double(), headwise_memory(*wide, 4, backend="reference"), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("leading", [(), (0,), (1,), (4,), (2, 0), (2, 3), (2, 1, 3)], ids=str)
def test_any_leading_shape_is_one_batch_of_tokens(leading):
    query, *tables = inputs(tokens=max(1, torch.Size(leading).numel()))
    shaped = query[: torch.Size(leading).numel()].reshape(*leading, 3, 8).requires_grad_()
    output = headwise_memory(shaped, *tables, 2)
    assert output.shape == (*leading, 3, 5)
    torch.testing.assert_close(output.reshape(-1, 3, 5), headwise_memory(shaped.reshape(-1, 3, 8), *tables, 2))
    output.sum().backward()
    assert shaped.grad.shape == shaped.shape


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"value_bank": (24, 5)},
            r"value_bank is \(24, 5\); expected \[n \* n, v\] or \[H, n \* n, v\] with n \* n = 25",
        ),
        ({"value_bank": (25,)}, r"value_bank is \(25,\); expected \[n \* n, v\] or"),
        ({"value_bank": (2, 25, 5)}, "value_transform is given with a bank per head; expected None, or a bank"),
        ({"value_transform": (2, 5, 4)}, r"value_transform is \(2, 5, 4\); expected \(H, v, v\) = \(2, 5, 5\)"),
        ({"value_transform": (1, 5, 5)}, r"value_transform is \(1, 5, 5\); expected \(H, v, v\) = \(2, 5, 5\)"),
        ({"column_keys": (2, 6, 4)}, r"column_keys is \(2, 6, 4\); expected the shape of row_keys"),
        ({"backend": "cuda"}, r"backend is 'cuda'; expected one of 'auto', 'reference', 'torch', 'native', 'triton'"),
    ],
)
def test_wrong_arguments_are_refused(changes, message):
    shapes = {
        "query": (3, 2, 8),
        "row_keys": (2, 5, 4),
        "column_keys": (2, 5, 4),
        "value_bank": (25, 5),
        "value_transform": (2, 5, 5),
        "k": 2,
        "backend": "torch",
        **changes,
    }
    arguments = {name: torch.zeros(shape) if isinstance(shape, tuple) else shape for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=message):
        headwise_memory(**arguments)

"""The kernels of attention of single tokens to chapters against the float64 reference: output and every gradient."""

import math

import pytest
import torch
from ops.chapter_loops import ODD
from ops.kernels.closeness import assert_close
from ops.kernels.conftest import DEVICE
from ops.laws import assert_equals_reference, output_and_gradients
from ops.table import OPS, blocks_of, opened

from midus_hf.ops.chapters import triton as kernels_of_chapters
from midus_hf.ops.chapters.op import chapter_attention

OP = OPS["chapters"]


@pytest.fixture
def backend() -> str:
    """Kernels; `tests/ops/test_chapter_attention.py` holds PyTorch's body to the same."""
    return "triton"


@pytest.fixture
def popular_chapters():
    """Several blocks of pairs of chapters 1 and 2, and few pairs of chapter 3; nobody reads the others."""
    arguments = opened(230, 1, 2, 8, 5, 4)
    arguments["chapters"] = torch.full_like(arguments["chapters"], 2)
    arguments["chapters"][::3] = 1
    arguments["chapters"][::100] = 3
    return arguments


def test_many_tokens_may_read_one_chapter_and_none_another(popular_chapters, backend):
    assert_equals_reference(OP, popular_chapters, backend)
    result = output_and_gradients(OP, popular_chapters, backend)
    for name in ("keys", "values"):
        assert [bool(chapter.any()) for chapter in result[name]] == [False, True, True, True, False]


@pytest.mark.parametrize("what", ODD)
def test_odd_arguments_give_what_the_reference_gives(what, backend):
    assert_equals_reference(OP, ODD[what](opened(40)), backend)


def test_large_scores_do_not_overflow(backend):
    arguments = opened(memory=40)
    arguments["query"] *= 1e3
    expected = output_and_gradients(OP, arguments, "reference", torch.float64)
    actual = output_and_gradients(OP, arguments, backend)
    torch.testing.assert_close(actual["output"].double(), expected["output"], rtol=1e-3, atol=1e-3)
    assert all(gradient.isfinite().all() for gradient in actual.values())


def test_a_query_that_is_not_finite_spoils_its_own_output_alone(backend):
    arguments = opened(20, 2, 2)
    expected = output_and_gradients(OP, arguments, backend)["output"]
    arguments["query"][3, 0], arguments["query"][11, 1] = math.nan, math.inf
    actual = output_and_gradients(OP, arguments, backend)["output"]
    spoiled = torch.zeros(20, 2, dtype=torch.bool, device=DEVICE)
    spoiled[3, 0] = spoiled[11, 1] = True
    assert actual[spoiled].isnan().all() and torch.equal(actual[~spoiled], expected[~spoiled])


def test_short_stretches_are_read_by_kernels_token_by_token(backend):
    arguments = opened(12, 2)
    arguments["query"] = arguments["query"].unflatten(0, (6, 2))
    for name in ("chapters", "scales"):
        arguments[name] = arguments[name][:6]
    leaves = {name: tensor.requires_grad_() for name, tensor in arguments.items() if tensor.is_floating_point()}
    wide = {name: tensor.detach().double().requires_grad_() for name, tensor in leaves.items()}
    output = chapter_attention(**arguments, backend=backend)
    expected = chapter_attention(**{**arguments, **wide}, backend="reference")
    assert_close("output", output, expected, torch.float32)
    pairs = zip(
        torch.autograd.grad(output.sum(), list(leaves.values())),
        torch.autograd.grad(expected.sum(), list(wide.values())),
        strict=True,
    )
    for name, (actual, exact) in zip(leaves, pairs, strict=True):
        assert_close(name, actual, exact, torch.float32)


class _Recorded:
    """Stands for a kernel: its launches are counted."""

    def __init__(self):
        self.launches = 0

    def __getitem__(self, grid):
        assert all(isinstance(size, int) and size > 0 for size in grid)
        self.launches += 1
        return lambda *arguments, **constants: None


def test_what_is_launched_depends_on_shapes_alone(monkeypatch):
    """So nothing waits for the device, and a CUDA graph may hold the op: values of a meta tensor cannot be asked for."""
    kernels = []
    for name in [name for name in vars(kernels_of_chapters) if name.endswith("_kernel")]:
        kernels.append(_Recorded())
        monkeypatch.setattr(kernels_of_chapters, name, kernels[-1])
    arguments = [tensor.to("meta") for tensor in blocks_of(opened(2000))]
    outputs, sums = kernels_of_chapters.triton_chapter_blocks(*arguments)
    gradients = kernels_of_chapters.triton_chapter_gradients(outputs, sums, *arguments, outputs, sums, True, True)
    assert [gradient.shape for gradient in gradients] == [tensor.shape for tensor in arguments[:4]]
    assert [kernel.launches for kernel in kernels] == [1] * 3

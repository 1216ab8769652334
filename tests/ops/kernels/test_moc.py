"""The kernels of attention of single tokens to chapters against the float64 reference: output and every gradient."""

import pytest
import torch
from ops.chapter_loops import ODD
from ops.laws import assert_equals_reference, output_and_gradients
from ops.table import OPS, block_arguments_from, opened

from midus_hf.ops.moc import triton as kernels_of_chapters

OP = OPS["chapters"]


@pytest.fixture
def popular_chapters():
    """Several blocks of pairs of chapters 1 and 2, and few pairs of chapter 3; nobody reads the others."""
    arguments = opened(230, 1, 2, 8, 5, 4)
    arguments["chapters"] = torch.full_like(arguments["chapters"], 2)
    arguments["chapters"][::3] = 1
    arguments["chapters"][::100] = 3
    return arguments


def test_many_tokens_may_read_one_chapter(popular_chapters):
    assert_equals_reference(OP, popular_chapters, "triton")
    result = output_and_gradients(OP, popular_chapters, "triton")
    for name in ("keys", "values"):
        assert [bool(chapter.any()) for chapter in result[name]] == [False, True, True, True, False]


@pytest.mark.parametrize("what", ODD)
def test_odd_arguments_equal_the_reference(what):
    assert_equals_reference(OP, ODD[what](opened(40)), "triton")


def test_short_segments_are_read_token_by_token():
    tokens = opened(12)
    tiles = {name: tokens[name][:6] for name in ("chapters", "scales")}
    assert_equals_reference(OP, tokens | tiles, "triton")


class _Recorded:
    """Stands for a kernel: its launches are counted."""

    def __init__(self):
        self.launches = 0

    def __getitem__(self, grid):
        assert all(isinstance(size, int) and size > 0 for size in grid)
        self.launches += 1
        return lambda *arguments, **constants: None


def test_launches_depend_only_on_shapes(monkeypatch):
    """So nothing waits for the device, and a CUDA graph may hold the op: values of a meta tensor cannot be asked for."""
    kernels = []
    for name in [name for name in vars(kernels_of_chapters) if name.endswith("_kernel")]:
        kernels.append(_Recorded())
        monkeypatch.setattr(kernels_of_chapters, name, kernels[-1])
    arguments = [tensor.to("meta") for tensor in block_arguments_from(opened(2000))]
    outputs, sums = kernels_of_chapters.triton_chapter_blocks(*arguments)
    gradients = kernels_of_chapters.triton_chapter_gradients(outputs, sums, *arguments, outputs, sums, [True] * 4)
    assert [gradient.shape for gradient in gradients] == [tensor.shape for tensor in arguments[:4]]
    assert [kernel.launches for kernel in kernels] == [1] * 3

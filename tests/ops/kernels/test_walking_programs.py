"""Programs that take several blocks of tokens of a head find what programs of one block find, bit for bit."""

from types import SimpleNamespace

import pytest
import torch
from ops.kernels.conftest import DEVICE

from midus_hf.ops.dispatch.triton import multiprocessors
from midus_hf.ops.headwise.lookup import lookup
from midus_hf.ops.headwise.triton import packed
from midus_hf.ops.headwise.triton.packed import PROGRAMS_A_MULTIPROCESSOR, blocks_a_program

# Tokens of a block where heads are narrow.
BLOCK = 64


def inputs(tokens, heads, own, dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, heads, 8), (heads, 6, 4), (heads, 6, 4), ((heads,) if own else ()) + (36, 5))
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def launched(monkeypatch):
    """Grids and arguments of the launches of the kernel, which run."""
    launches = []
    kernel = packed.packed_forward_kernel

    class Watched:
        def __getitem__(self, grid):
            return lambda *given, **named: (launches.append((grid, named)), kernel[grid](*given, **named))[1]

    monkeypatch.setattr(packed, "packed_forward_kernel", Watched())
    return launches


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "tokens, heads, own, adds, programs, taken",
    [
        (2 * BLOCK, 2, False, False, 1, 1),  # without a mask
        (3 * BLOCK + 5, 1, True, True, 2, 2),
        (2 * BLOCK + 1, 3, False, True, 2, 2),  # not all heads run side by side, and one program has a block less
        (3 * BLOCK - 1, 2, True, False, 1, 1),
        (5 * BLOCK, 1, False, False, 4, 3),  # as even as it can be
        (BLOCK + 1, 2, True, True, 3, 2),  # no more blocks than programs
        (BLOCK - 1, 2, False, True, 3, 1),
    ],
)
def test_walking_changes_no_bit(tokens, heads, own, adds, programs, taken, dtype, monkeypatch):
    arguments, launches = inputs(tokens, heads, own, dtype), launched(monkeypatch)
    residual = torch.randn(tokens, heads, 5, device=DEVICE).to(dtype) if adds else None
    monkeypatch.setattr(packed, "HEADS_TOGETHER", 2)
    monkeypatch.setattr(packed, "PROGRAMS_A_MULTIPROCESSOR", 1)
    found = []
    for most in (programs, tokens):  # of a head
        monkeypatch.setattr(packed, "multiprocessors", lambda _, most=most: most * min(heads, 2))
        found.append(lookup(*arguments, residual, 3, 0.7, False, "triton"))
    blocks = -(-tokens // BLOCK)
    assert [grid for grid, _ in launches] == [(taken * heads,), (blocks * heads,)]
    assert [named["WALKS"] for _, named in launches] == [blocks > programs, False]
    assert all(torch.equal(walked, expected) for walked, expected in zip(*found, strict=True))


def test_programs_walk_where_a_head_has_more_blocks_than_its_share_of_the_device():
    share = 132 * PROGRAMS_A_MULTIPROCESSOR // 8
    taken = {1: 1, share: 1, share + 1: 2, 2 * share: 2, 2 * share + 1: 3}
    assert {blocks: blocks_a_program(blocks, 32, 132) for blocks in taken} == taken
    assert blocks_a_program(share + 1, 4, 132) == 1  # of few heads each has more programs


def test_a_gpu_is_asked_once_and_what_is_none_has_as_many_multiprocessors_as_an_h200(monkeypatch):
    asked = []

    def properties(device):
        asked.append(device)
        return SimpleNamespace(multi_processor_count=7)

    monkeypatch.setattr("torch.cuda.get_device_properties", properties)
    there = SimpleNamespace(is_cuda=True, device="a GPU of this test")
    assert [multiprocessors(there), multiprocessors(there), len(asked)] == [7, 7, 1]
    assert multiprocessors(torch.empty(0)) == 132

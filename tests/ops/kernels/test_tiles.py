"""Kernels compute the same by whichever tile they have."""

from functools import cache

import pytest
import torch
from ops.kernels.conftest import DEVICE
from pairs import by_default

from benchmarks.tiles.cases import cases
from benchmarks.tiles.trying import candidates, shape_of_call, trying
from midus_hf.ops.dispatch.tiles import TILES

KERNELS = {
    "memory tiny": (
        "packed_forward_kernel",
        "score_gradient_kernel",
        "bucket_sums_kernel",
        "packed_scores_kernel",
        "forward_kernel",
        "scores_kernel",
    ),
    "chapters tiny": ("chapter_forward_kernel", "chapter_pair_gradient_kernel", "chapter_table_gradient_kernel"),
    "depth tiny": ("depth_forward_kernel", "depth_gradient_kernel"),
}
ALL = [(case, kernel) for case, kernels in KERNELS.items() for kernel in kernels]


@cache
def calls_of(case):
    torch.manual_seed(0)
    return next(one for one in cases(is_rehearsal=True) if one.name == case).build(DEVICE)


def numbers(result):
    return torch.cat([part.double().flatten() for part in torch.utils._pytree.tree_leaves(result) if part is not None])


@pytest.mark.parametrize("most", by_default([1], [1, 12]))
@pytest.mark.parametrize("case, kernel", ALL, ids=[kernel for _, kernel in ALL])
def test_every_tile_that_may_be_tried_computes_what_the_rules_does(case, kernel, most):
    call, tiles = calls_of(case)[kernel], TILES[kernel]
    shape = shape_of_call(tiles, call)
    expected = numbers(call())
    tried = candidates(tiles, *shape)
    assert 2 <= len(tried) <= 12
    for changes in tried[-most:]:
        with trying(tiles, changes):
            tile = tiles(torch.device(DEVICE), *shape)
            assert {name: tile[name] for name in changes} == changes
            torch.testing.assert_close(numbers(call()), expected, rtol=2e-2, atol=2e-2)


def test_every_kernel_that_has_tiles_is_timed():
    assert {kernel for _, kernel in ALL} == set(TILES)
    assert {kernel for case in KERNELS for kernel in calls_of(case)} == set(TILES)

"""The least work of one memory layer at 32,768 tokens in bfloat16, against numbers worked out by hand."""

import pytest

from benchmarks.ops.roofline import (
    H200,
    Work,
    bag_work,
    expansion_flop,
    gathered_bytes,
    headwise_work,
    peaks_of,
    saved_bytes,
    scoring_flop,
    selection_work,
    stream_bytes,
)
from benchmarks.ops.shapes import SHAPES

TOKENS = 32_768
# Of the two models: GFLOP, MB, and microseconds where one resource is the only one.
TABLE = {
    "llama-3.2-1b": {
        "scoring": (8.6, 11),
        "expansion": (1.07, 1.4),
        "gather": 537,
        "forward streams": (268, 62),
        "backward streams": (419, 98),
        "backward products": (17.2, 22),
        "finishing": 2.15,
        "forward": 100,
        "backward": 200,
    },
    "llama-3.1-8b": {
        "scoring": (17.2, 22),
        "expansion": (4.3, 5.4),
        "gather": 1074,
        "forward streams": (537, 125),
        "backward streams": (822, 191),
        "backward products": (34.4, 44),
        "finishing": 8.6,
        "forward": 195,
        "backward": 400,
    },
}


@pytest.mark.parametrize("name", TABLE)
def test_one_layer_is_the_work_that_it_was_worked_out_to_be(name):
    shape, expected = SHAPES[name], TABLE[name]

    def flop(count, published):
        gigaflop, microseconds = published
        assert count / 1e9 == pytest.approx(gigaflop, rel=0.01)
        assert Work(flop=count).microseconds(H200) == pytest.approx(microseconds, rel=0.05)

    def streams(count, published):
        megabytes, microseconds = published
        assert round(count / 1e6) == megabytes
        assert round(Work(memory_bytes=count).microseconds(H200)) == pytest.approx(microseconds, abs=1)

    flop(scoring_flop(shape, TOKENS), expected["scoring"])
    flop(expansion_flop(shape), expected["expansion"])
    flop(2 * scoring_flop(shape, TOKENS), expected["backward products"])
    assert 2 * expansion_flop(shape) / 1e9 == pytest.approx(expected["finishing"], rel=0.01)
    assert round(gathered_bytes(shape, TOKENS, 2) / 1e6) == expected["gather"]
    assert saved_bytes(shape, TOKENS) / 1e6 == pytest.approx(16.8, rel=0.01)
    assert stream_bytes(shape, TOKENS, 2) == TOKENS * shape.heads * shape.head_dim * 2
    streams(headwise_work(shape, TOKENS, 2, "forward").memory_bytes, expected["forward streams"])
    streams(headwise_work(shape, TOKENS, 2, "backward").memory_bytes, expected["backward streams"])
    for mode in ("forward", "backward"):
        floor = headwise_work(shape, TOKENS, 2, mode).microseconds(H200)
        assert floor == pytest.approx(expected[mode], rel=0.03)


def test_selection_takes_96_microseconds_of_all_lanes():
    for name in TABLE:
        work = headwise_work(SHAPES[name], TOKENS, 2, "forward")
        assert work.comparisons == 1360 * 32 * TOKENS
        assert Work(comparisons=work.comparisons).microseconds(H200) == pytest.approx(96.2, rel=0.001)


def test_selection_alone_is_bound_by_its_comparisons():
    work = selection_work(SHAPES["llama-3.2-1b"], TOKENS, 2, "forward")
    assert work.microseconds(H200) == pytest.approx(96.2, rel=0.001)


def test_a_small_bank_is_cheaper_multiplied_than_gathered():
    shape = SHAPES["llama-3.2-1b"]
    work = bag_work(shape, TOKENS, 2, "forward")
    assert work.flop == 2 * TOKENS * 4096 * 2048
    assert work.microseconds(H200) == pytest.approx(696, rel=0.01)


def test_peaks_are_known_of_one_gpu():
    assert peaks_of("NVIDIA H200") is H200
    assert peaks_of("NVIDIA A100-SXM4-80GB") is None
    assert peaks_of("cpu") is None

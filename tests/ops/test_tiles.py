"""Tiles come from a rule, or from what was measured on the device, and nothing else."""

import itertools
import threading

import pytest
import torch

from benchmarks.tiles.run import source
from benchmarks.tiles.trying import candidates, shape_of_call, trying
from midus_hf.ops.dispatch import tiles
from midus_hf.ops.dispatch.tiles import MEASURED, TABLE, TILES, Tiles

CPU, META = torch.device("cpu"), torch.device("meta")


def rule(changes, rows, is_wide):
    tile = {"BT": 16 if is_wide else 64, "num_warps": 4} | changes
    return tile | {"TILES": rows // tile["BT"]}


@pytest.fixture
def of_kernel(monkeypatch):
    monkeypatch.setitem(
        MEASURED, "cpu", {"some_kernel": {(128, False): {"BT": 32}}, "other": {(128, True): {"BT": 32}}}
    )
    return Tiles("some_kernel", rule, {"BT": (16, 64), "num_warps": (1, 8)})


def test_a_rule_is_followed_where_nothing_was_measured(of_kernel):
    assert of_kernel(CPU, 128, True) == {"BT": 16, "num_warps": 4, "TILES": 8}
    assert of_kernel(CPU, 256, False) == {"BT": 64, "num_warps": 4, "TILES": 4}


def test_what_was_measured_of_the_kernel_the_shape_and_the_device_is_taken(of_kernel):
    assert of_kernel(CPU, 128, False) == {"BT": 32, "num_warps": 4, "TILES": 4}
    assert of_kernel(META, 128, False) == {"BT": 64, "num_warps": 4, "TILES": 2}


def test_gpus_are_told_apart_by_name(of_kernel, monkeypatch):
    names = {0: "cpu", 1: "NVIDIA H200"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device.index])
    monkeypatch.setattr(tiles, "_name_of", tiles._name_of.__wrapped__)
    assert [of_kernel(torch.device("cuda", place), 128, False)["BT"] for place in names] == [32, 64]


def test_what_is_tried_stands_above_what_was_measured_and_goes_with_its_context(of_kernel):
    before = of_kernel(CPU, 128, False)
    with trying(of_kernel, {"num_warps": 8}):
        assert of_kernel(CPU, 128, False) == {"BT": 64, "num_warps": 8, "TILES": 2}
        with trying(of_kernel, {}):
            assert of_kernel(CPU, 128, False)["num_warps"] == 4
        assert of_kernel(CPU, 128, False)["num_warps"] == 8
        assert of_kernel(META, 128, False)["num_warps"] == 8
    assert of_kernel(CPU, 128, False) == before
    with pytest.raises(ZeroDivisionError), trying(of_kernel, {"num_warps": 8}):
        raise ZeroDivisionError
    assert of_kernel(CPU, 128, False) == before


def test_threads_of_autograd_try_what_is_tried(of_kernel):
    found = []
    with trying(of_kernel, {"num_warps": 2}):
        thread = threading.Thread(target=lambda: found.append(of_kernel(CPU, 128, False)["num_warps"]))
        thread.start()
        thread.join()
    assert found == [2]


def test_candidates_are_one_step_away_or_two_that_keep_what_a_thread_has(of_kernel):
    alone = [{"BT": 32}, {"num_warps": 2}, {"num_warps": 8}]
    assert candidates(of_kernel, 128, False) == [*alone, {"BT": 32, "num_warps": 2}]
    assert candidates(of_kernel, 128, True) == [*alone, {"BT": 32, "num_warps": 8}]


def test_what_a_call_asks_for_is_the_shape_of_its_last_launch(of_kernel):
    assert shape_of_call(of_kernel, lambda: of_kernel(CPU, 128, False)) == (128, False)
    assert shape_of_call(of_kernel, lambda: None) is None
    assert of_kernel(CPU, 128, False)["BT"] == 32


def test_a_kernel_has_one_rule():
    with pytest.raises(ValueError, match="kernel 'forward_kernel' already has tiles; choose another name"):
        tiles.tiles("forward_kernel", BT=(16, 64))


def test_the_table_is_as_its_benchmark_writes_it_and_tells_of_what_may_be_changed():
    assert TABLE.read_text(encoding="utf-8") == source(MEASURED)
    for kernel, shapes in itertools.chain.from_iterable(of_device.items() for of_device in MEASURED.values()):
        for shape, changes in shapes.items():
            assert changes in candidates(TILES[kernel], *shape)

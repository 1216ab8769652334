"""The table of memory types and the entries that configs name them by."""

import dataclasses
import subprocess
import sys

import pytest
import torch

from midus_hf.memory import MEMORY_TYPES, MemoryModule, MemoryOptions, register_memory
from midus_hf.memory.headwise import HeadwiseMemory, HeadwiseOptions
from midus_hf.memory.registry import parse_memory_entry


@pytest.fixture
def table(monkeypatch):
    """The table of types, put back after the test."""
    before = dict(MEMORY_TYPES)
    yield MEMORY_TYPES
    MEMORY_TYPES.clear()
    MEMORY_TYPES.update(before)


def test_an_entry_names_a_class_and_its_options():
    memory_class, options = parse_memory_entry({"type": "headwise", "layers": [1, 4], "n": 8, "k": 2})
    assert memory_class is HeadwiseMemory
    assert options == HeadwiseOptions(layers=[1, 4], n=8, k=2)


def test_an_entry_that_names_no_sizes_gets_those_of_the_paper():
    _, options = parse_memory_entry({"type": "headwise", "layers": [0]})
    assert (options.n, options.k) == (64, 4)


@pytest.mark.parametrize(
    "entry, message",
    [
        ({"layers": [1]}, r"memory type is None; expected one of \['headwise'"),
        ({"type": "head-wise", "layers": [1]}, r"memory type is 'head-wise'; expected one of \['headwise', .*\]\.$"),
        ({"type": "Headwise", "layers": [1]}, r"memory type is 'Headwise'; expected one of \['headwise', .*\]\.$"),
        ({"type": "attention", "layers": [1]}, r"memory type is 'attention'; expected one of \[.*\]\.$"),
        ({"type": ["headwise"], "layers": [1]}, r"memory type is \['headwise'\]; expected one of"),
        ({"type": "headwise"}, r"type 'headwise' has no 'layers'; expected the indices of the layers that hold it"),
        (
            {"type": "headwise", "layers": [1], "topk": 4, "N": 2},
            r"type 'headwise' has unknown keys \['N', 'topk'\]; it knows \['gate', .*'layers', 'n', .*\]",
        ),
        ({"type": "headwise", "layers": 1}, r"layers is 1; expected a list of layer indices"),
        ({"type": "headwise", "layers": ["1"]}, r"layers is \['1'\]; expected a list of layer indices"),
        ({"type": "headwise", "layers": [True]}, r"layers is \[True\]; expected a list of layer indices"),
        ({"type": "headwise", "layers": None}, r"layers is None; expected a list of layer indices"),
        ({"type": "headwise", "layers": [4, 1]}, r"layers is \[4, 1\]; expected ascending indices, each once"),
        ({"type": "headwise", "layers": [1, 1]}, r"layers is \[1, 1\]; expected ascending indices, each once"),
        ({"type": "headwise", "layers": [1], "n": "8"}, r"n is '8'; expected a whole number"),
        ({"type": "headwise", "layers": [1], "k": 2.0}, r"k is 2\.0; expected a whole number"),
        ({"type": "headwise", "layers": [1], "n": 0}, r"n is 0; expected at least one sub-key a side"),
        ({"type": "headwise", "layers": [1], "n": 8, "k": 0}, r"k is 0; expected 1 <= k <= n = 8"),
        (
            {"type": "headwise", "layers": [1], "n": 8, "k": 9},
            r"k is 9; expected 1 <= k <= n = 8\. Lower k or raise n",
        ),
        (
            "headwise",
            r"memory entry is 'headwise'; expected a mapping such as \{'type': 'headwise', 'layers': \[1\]\}",
        ),
    ],
    ids=str,
)
def test_a_wrong_entry_is_refused(entry, message):
    with pytest.raises(ValueError, match=message):
        parse_memory_entry(entry)


def test_a_registered_type_is_found_by_its_name(table):
    @dataclasses.dataclass(kw_only=True)
    class Options(MemoryOptions):
        size: int = 3

    @register_memory("example", Options)
    class Example(MemoryModule):
        site = "inserted"

    memory_class, options = parse_memory_entry({"type": "example", "layers": [2]})
    assert memory_class is Example and options == Options(layers=[2], size=3)
    assert Example.options_class is Options and not options.keeps_output_projection


def test_a_name_that_is_taken_is_refused(table):
    class Rival(MemoryModule):
        site = "inserted"

    with pytest.raises(
        ValueError, match="memory type 'headwise' is already registered by HeadwiseMemory; choose another"
    ):
        register_memory("headwise", HeadwiseOptions)(Rival)
    assert table["headwise"] is HeadwiseMemory


def test_the_same_class_loaded_twice_takes_its_own_name_again(table):
    again = type("HeadwiseMemory", (HeadwiseMemory,), {"__qualname__": "HeadwiseMemory"})
    assert register_memory("headwise", HeadwiseOptions)(again) is again
    assert table["headwise"] is again


def test_a_memory_that_does_not_say_how_it_is_built_or_filled_is_refused():
    class Unfinished(MemoryModule):
        site = "inserted"

    with pytest.raises(TypeError, match="Unfinished does not say how it is built from a config"):
        Unfinished.from_config(None, MemoryOptions(layers=[0]))
    with pytest.raises(TypeError, match="Unfinished does not say how table is initialised"):
        Unfinished().init_parameter("table", torch.empty(1))


def test_importing_the_package_registers_every_type():
    code = "from midus_hf.memory import MEMORY_TYPES; print(*sorted(MEMORY_TYPES))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["headwise", "linear", "product-key"]


@pytest.mark.parametrize("name", sorted(MEMORY_TYPES))
def test_every_registered_type_says_where_it_sits_and_what_it_trains_as_keys_and_values(name):
    memory_class = MEMORY_TYPES[name]
    assert memory_class.site == "inserted"
    assert issubclass(memory_class.options_class, MemoryOptions)
    assert memory_class.key_value_parameters and memory_class.__doc__

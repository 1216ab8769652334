"""Types of fetched memories, their options, and entries that do not fit."""

import math

import pytest
from memory.hierarchical_memories import (
    LAYERS,
    SIZES,
    TYPES,
)

from midus_hf.memories.entries import read_memories
from midus_hf.memories.module import build_memory
from midus_hf.memories.registry import MEMORY_TYPES


@pytest.mark.parametrize("kind", TYPES)
def test_a_memory_has_no_tensors_of_its_own(kind):
    options = TYPES[kind]()
    assert options.sizes == [256, 64, 16, 0] and options.branching == 16 and options.without_ids == "none"
    assert options.tensors(SIZES) == {} and options.tables(SIZES, LAYERS) == ()
    assert not list(build_memory(options, SIZES).parameters()) and not list(build_memory(options, SIZES).buffers())


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("hier-ffn", {"branching": 1}, "branching is 1; expected 2 or more."),
        *(
            (
                "hier-kv",
                {"sizes": sizes},
                f"sizes is {sizes}; expected a size for each level of the tree, 0 or more, and not all of them 0, such as "
                "[256, 64, 16, 0].",
            )
            for sizes in ([], [0, 0], [4, -1])
        ),
        *(
            ("hier-lora-qk", {"alpha": alpha}, f"alpha is {alpha!r}; expected a number above 0.")
            for alpha in (0.0, -1.0, math.inf, math.nan)
        ),
    ],
    ids=str,
)
def test_options_that_make_no_memory_are_refused(kind, changes, message):
    with pytest.raises(ValueError) as raised:
        TYPES[kind](**changes)
    assert str(raised.value) == message


def entry(kind="hier-ffn", **changes):
    return {"type": kind, "layers": [0, 2], "sizes": [2, 1], "branching": 3, **changes}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([entry(site="behind-layer")], "memory of type 'hier-ffn' has site = 'behind-layer'; expected one of: beside-ffn."),
        ([entry("hier-kv", site="inserted")], "memory of type 'hier-kv' has site = 'inserted'; expected one of: inside-attention."),
        ([entry(alpha=1.0)], "alpha"),
        ([entry("hier-lora-vo", rank=4)], "rank"),
        ([entry(without_ids="all")], "without_ids"),
        ([entry(sizes=4)], "sizes"),
        ([entry(sizes=[1.5])], "sizes"),
        ([entry(branching=2.5)], "branching"),
        (
            [entry(), entry("hier-kv", branching=4)],
            "memory 'hier-kv' fetches blocks by a tree of branching 4 and 2 levels, and 'hier-ffn' by one of branching 3 and 2 "
            "levels; expected one tree, by whose nodes a text fetches from both.",
        ),
        (
            [entry(), entry("hier-kv", sizes=[2, 1, 0])],
            "memory 'hier-kv' fetches blocks by a tree of branching 3 and 3 levels, and 'hier-ffn' by one of branching 3 and 2 "
            "levels; expected one tree, by whose nodes a text fetches from both.",
        ),
        ([entry(), entry()], "two memories have the name 'hier-ffn'; expected a separate name for each."),
    ],
)  # fmt: skip
def test_entries_that_do_not_fit_are_refused(entries, message):
    with pytest.raises(ValueError) as raised:
        read_memories(entries, SIZES)
    assert message in str(raised.value)


def test_memories_of_one_tree_have_a_bank_each():
    memories = read_memories([entry(), entry("hier-kv", layers=[1]), entry(name="second")], SIZES)
    assert list(memories.banks) == ["hier-ffn", "hier-kv", "second"]
    assert memories.banks["hier-kv"].layers == (1,) and memories.banks["second"].memory_type == "hier-ffn"


def test_these_are_all_the_types():
    assert set(TYPES) == {name for name in MEMORY_TYPES if name.startswith("hier-")}

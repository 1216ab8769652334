"""What the default run leaves out, and that it leaves out nothing else."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pairs
import pytest
from pairs import Extent, by_default, in_turn, keep_each_value, keep_pairs, taking_turns


def item(test: str, *, marks: dict[str, Any] | None = None, **params: Any) -> SimpleNamespace:
    """A test as pytest collects it, with marks that have one argument each."""
    found = {name: [SimpleNamespace(args=(argument,))] for name, argument in (marks or {}).items()}
    return SimpleNamespace(
        nodeid=f"{test}[{'-'.join(map(str, params.values()))}]",
        callspec=SimpleNamespace(params=params),
        iter_markers=lambda name: found.get(name, []),
    )


def product(test: str, families: str, sizes: range, **more: Any) -> list[SimpleNamespace]:
    return [item(test, family=family, size=size, **more) for family in families for size in sizes]


def values_of(items: list[SimpleNamespace], name: str) -> set[Any]:
    return {item.callspec.params[name] for item in items}


@pytest.mark.parametrize("num_sizes", [1, 2, 5, 7])
def test_every_family_and_other_parameter_stays(num_sizes):
    kept = keep_pairs([*product("test", "abcde", range(num_sizes)), *product("other", "abc", range(1))])
    of_test = [item for item in kept if item.nodeid.startswith("test")]
    assert values_of(of_test, "family") == set("abcde")
    assert values_of(of_test, "size") == set(range(num_sizes))
    assert len(of_test) == max(5, num_sizes)
    assert len(kept) == len(of_test) + 3
    stay = [item("plain", size=size) for size in range(4)]  # those that are not paired, but not of the product
    stay += product("chosen", "abc", range(2), marks={"parametrize": "size, family"})
    assert keep_pairs([*stay, item("plain", size=5, marks={"product": None})]) == stay


def test_pairing_covers_every_value_minimally():
    kept = keep_each_value([*(item("one", first=a, second=b) for a in "abc" for b in range(5)), item("plain")])
    assert kept[-1].nodeid == "plain[]"
    assert len(kept) == 5 + 1
    assert values_of(kept[:-1], "first") == set("abc")
    assert values_of(kept[:-1], "second") == set(range(5))
    kept = keep_each_value(item for number in range(20) for item in product(f"test {number}", "abcdefg", range(2)))
    assert len(kept) == 20 * 2
    assert values_of(kept, "family") == set("abcdefg")


@pytest.fixture
def run_with(monkeypatch):
    return lambda extent: monkeypatch.setattr(pairs, "extent", extent)


def test_rows_take_their_columns_in_turn(run_with):
    assert taking_turns("abc", [0, 1]) == [("a", 0), ("b", 1), ("c", 0)]
    assert taking_turns("abc", [0, 1], first=5) == [("a", 1), ("b", 0), ("c", 1)]
    run_with(Extent.USUAL)
    assert in_turn("abc", [0, 1]) == taking_turns("abc", [0, 1])
    assert in_turn("abc", [0, 1], kept="bc") == [("b", 0), ("c", 1)]
    run_with(Extent.FEWEST)
    assert in_turn("abc", [0, 1], kept="bc") == [("b", 0), ("c", 1)]
    assert in_turn("abcd", [0, 1], kept="bcd", fewest="ab") == [("a", 0), ("b", 1)]
    run_with(Extent.ALL)
    assert in_turn("abc", [0, 1], kept="bc") == list(itertools.product("abc", [0, 1]))
    with pytest.raises(AssertionError):
        taking_turns("a", [0, 1])


def test_other_values_run_with_the_product(run_with):
    values = [1, (2, 3), "last"]
    for extent, expected in ((Extent.USUAL, [1, "last"]), (Extent.FEWEST, [(2, 3)]), (Extent.ALL, values)):
        run_with(extent)
        assert by_default(["last", 1], values, fewest=[(2, 3)]) == expected
        with pytest.raises(AssertionError):
            by_default([4], [1])
    run_with(Extent.FEWEST)
    assert by_default([1], values) == [1]


@pytest.mark.parametrize(("arguments", "product", "each_value", "extent"), [
    (["tests"], False, [], Extent.USUAL),
    (["tests"], False, ["tests/models"], Extent.FEWEST),
    (["tests"], True, [], Extent.ALL),
    (["tests/test_pairs.py::test"], False, ["tests/models"], Extent.ALL),
])  # fmt: skip
def test_command_words_choose_the_extent(arguments, product, each_value, extent, run_with, pytestconfig):
    run_with(Extent.USUAL)
    options = {"--product": product, "--each-value": each_value}
    conftest = pytestconfig.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))
    conftest.pytest_configure(SimpleNamespace(args=arguments, getoption=options.get))
    assert pairs.extent is extent

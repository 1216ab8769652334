"""Which tests run by default: every family and every other parameter, not their product.

Where tests run a second time, with other versions of what we depend on, each value of a parameter runs once.
"""

import itertools
import zlib
from collections.abc import Hashable, Iterable
from enum import Enum
from typing import Any

FAMILY_FIXTURES = ("family", "native_family")


class Extent(Enum):
    """Which values of its parameters a test runs with, where they are chosen by `by_default`."""

    ALL = "all"
    USUAL = "usual"
    # Where other versions have run the usual ones.
    FEWEST = "fewest"


# Of this run: conftest.py sets it before tests are imported.
extent = Extent.USUAL


def keep_pairs(items: Iterable[Any]) -> list[Any]:
    """Of tests whose fixture gives families keep each one and all else once, and no product."""
    items = [item for item in items if not any(item.iter_markers("product"))]
    axes = [_axes(item) for item in items]
    families: dict[Hashable, dict[Hashable, int]] = {}
    others: dict[Hashable, dict[Hashable, int]] = {}
    for test, family, other in filter(None, axes):
        for table, value in ((families, family), (others, other)):
            numbers = table.setdefault(test, {})
            numbers.setdefault(value, len(numbers))

    def stays(axis: tuple[Hashable, Hashable, Hashable] | None) -> bool:
        if axis is None:
            return True
        test, family, other = axis
        row, column = families[test][family], others[test][other]
        num_rows, num_columns = len(families[test]), len(others[test])
        return row == column % num_rows if num_columns >= num_rows else column == row % num_columns

    return [item for item, axis in zip(items, axes, strict=True) if stays(axis)]


def keep_each_value(items: Iterable[Any]) -> list[Any]:
    """Of each test, keep every value of every parameter except the family, which takes turns."""
    items = list(items)
    by_test: dict[str, list[int]] = {}
    for number, item in enumerate(items):
        by_test.setdefault(item.nodeid.partition("[")[0], []).append(number)
    kept = set()
    for test, numbers in by_test.items():
        first = zlib.crc32(test.encode()) % len(numbers)
        seen: set[Hashable] = set()
        # First those that share no value, so that few are needed for what is left.
        for enough in (set.isdisjoint, lambda value, seen: not value <= seen):
            for number in (*numbers[first:], *numbers[:first]):
                value = _values(items[number])
                if enough(value, seen):
                    kept.add(number)
                    seen |= value
    return [item for number, item in enumerate(items) if number in kept]


def by_default(kept: Iterable[Any], values: Iterable[Any], *, fewest: Iterable[Any] | None = None) -> list[Any]:
    """Values: the kept ones by default, `fewest` with other versions, and all with the product."""
    kept, values = list(kept), list(values)
    fewest = kept if fewest is None else list(fewest)
    assert all(value in values for value in (*kept, *fewest))
    chosen = {Extent.ALL: values, Extent.USUAL: kept, Extent.FEWEST: fewest}[extent]
    return [value for value in values if value in chosen]


def taking_turns(rows: Iterable[Any], columns: Iterable[Any], *, first: int = 0) -> list[tuple[Any, Any]]:
    """Each row with one column, the columns in turn from the one numbered `first`."""
    rows, columns = list(rows), list(columns)
    assert len(rows) >= len(columns)
    return [(row, columns[(first + number) % len(columns)]) for number, row in enumerate(rows)]


def in_turn(rows: Iterable[Any], columns: Iterable[Any], *, kept: Any = None, fewest: Any = None) -> list[Any]:
    """Kept rows with one column each, the columns in turn; with the product each with each."""
    rows, columns = list(rows), list(columns)
    usual = taking_turns(rows if kept is None else kept, columns)
    few = None if fewest is None else taking_turns(fewest, columns)
    return by_default(usual, itertools.product(rows, columns), fewest=few)


def wanted_by_tests(request: Any, *names: str) -> list[tuple[Any, ...]]:
    """The values of these parameters that tests with this fixture run with."""
    users = [item for item in request.session.items if item.path == request.path]
    users = [item for item in users if request.fixturename in item.fixturenames and hasattr(item, "callspec")]
    arguments = [item.callspec.params for item in users if {*names} <= item.callspec.params.keys()]
    return list(dict.fromkeys(tuple(params[name] for name in names) for params in arguments))


def _axes(item: Any) -> tuple[Hashable, Hashable, Hashable] | None:
    """The test, its family and its other parameters; None where no fixture gives the family."""
    parameters = _parameters(item)
    fixture = next((name for name in FAMILY_FIXTURES if name in parameters), None)
    chosen = {name for mark in item.iter_markers("parametrize") for name in _names(mark.args[0])}
    if fixture is None or fixture in chosen:
        return None
    other = tuple((name, str(value)) for name, value in sorted(parameters.items()) if name != fixture)
    return (item.nodeid.partition("[")[0], parameters[fixture], other)


def _values(item: Any) -> set[Hashable]:
    """Each value of a test's parameters except families; one for the test where it has none."""
    return {(name, str(value)) for name, value in _parameters(item).items() if name not in FAMILY_FIXTURES} or {""}


def _parameters(item: Any) -> dict[str, Any]:
    return getattr(getattr(item, "callspec", None), "params", {})


def _names(argnames: str | Iterable[str]) -> list[str]:
    return [name.strip() for name in argnames.split(",")] if isinstance(argnames, str) else list(argnames)

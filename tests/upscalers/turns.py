"""Parameters of a test taken in turn, where their product would only repeat what single ones show."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from pairs import by_default
from tiny import FAMILIES


def in_turn(rows: Sequence[Any], columns: Sequence[Any]) -> list[Any]:
    """Each row with each column: by default every row with one column, the columns in turn, and the others with the product."""
    rows, columns = list(rows), list(columns)
    assert len(rows) >= len(columns)  # or columns would be left out
    kept = [(row, columns[number % len(columns)]) for number, row in enumerate(rows)]
    return by_default(kept, itertools.product(rows, columns))


def families(*kept: str) -> Any:
    """A fixture of families for a file whose subject knows none: two run by default, the others with the product.

    Args:
        kept: Of those that host memory; other ones from file to file, so that all families meet.
    """

    @pytest.fixture(params=by_default(kept, FAMILIES))
    def chosen(request) -> str:
        return request.param

    return chosen

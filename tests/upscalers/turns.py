"""Parameters of a test taken in turn, where their product would only repeat what single ones show."""

import itertools
from collections.abc import Sequence
from typing import Any

from pairs import by_default


def in_turn(rows: Sequence[Any], columns: Sequence[Any]) -> list[Any]:
    """Each row with each column: by default every row with one column, the columns in turn, and the others with the product."""
    rows, columns = list(rows), list(columns)
    assert len(rows) >= len(columns)  # or columns would be left out
    kept = [(row, columns[number % len(columns)]) for number, row in enumerate(rows)]
    return by_default(kept, itertools.product(rows, columns))

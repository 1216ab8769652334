"""Families for tests of what knows none."""

from typing import Any

import pytest
from pairs import by_default
from tiny import FAMILIES


def families(*kept: str) -> Any:
    """A fixture of families, `family`: some by default, and the others with the product.

    Args:
        kept: Of those that host memory; other ones from file to file, so that all families meet.
    """

    @pytest.fixture(params=by_default(kept, FAMILIES))
    def family(request) -> str:
        return request.param

    return family

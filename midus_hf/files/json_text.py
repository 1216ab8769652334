"""JSON of files that people hand over, in which any fault is a `ValueError`."""

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Return what JSON text says.

    Args:
        text: The text; bytes in UTF-8.

    Raises:
        ValueError: If the text is not JSON, or is nested more deeply than Python can read (`json.loads` raises `RecursionError`
            there, which no reader of files expects).
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None

"""Parsing JSON files that people provide, in which every fault becomes a `ValueError`."""

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Return the value of JSON text.

    Args:
        text: The text; bytes are decoded as UTF-8.

    Raises:
        ValueError: If the text is not JSON, or is nested more deeply than Python can read. In the second case
            `json.loads` raises `RecursionError`, which callers do not expect.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None

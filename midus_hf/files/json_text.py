"""Parsing JSON files that people provide, in which every fault becomes a `ValueError`."""

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Return the value of JSON text; bytes are decoded as UTF-8.

    Raises:
        ValueError: If the text is not JSON, or is nested more deeply than Python can read, for which `json.loads` raises
            `RecursionError`.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None

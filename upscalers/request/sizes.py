"""Sizes as people write them."""

import re

from upscalers.request.errors import RequestError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*([A-Za-z]*)$")


def parse_size(size: str | int) -> int:
    """Bytes of `"5GB"`, `"500MB"` or a plain number.

    Raises:
        RequestError: If it is no positive size.
    """
    match = _SIZE.match(str(size).strip())
    if not match or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise RequestError(f"max-shard-size is {size!r}; expected a positive size such as 5GB or 500MB.")
    return max(1, int(float(match[1]) * _UNITS[match[2].upper()]))

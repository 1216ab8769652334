"""The tiles that were measured to be the fastest, by the name of the device. Written by `python -m benchmarks tiles --write`."""

from typing import Any

MEASURED: dict[str, dict[str, dict[tuple[Any, ...], dict[str, int]]]] = {}
"""By device, kernel and shape: what differs from the rule."""

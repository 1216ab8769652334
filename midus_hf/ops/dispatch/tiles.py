"""Tiles of kernels: how much one of its programs takes at a time, by a rule, or as measured on the device.

A rule knows what is computed, in a few whole numbers and truth values, so what the rule says is kept. Nothing is searched when a
kernel is first needed: `python -m benchmarks tiles` tries the few candidates that a rule allows, and writes those that were faster
into `tiles.json`, where they stand by the device's name.
"""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

Changes = Mapping[str, int]
"""What differs from the rule, by the name of a kernel's parameter or of an option of the compiler."""
Tile = dict[str, Any]
"""Parameters of a kernel and options of the compiler."""
Rule = Callable[..., Tile]
Measured = dict[str, dict[str, dict[tuple[Any, ...], Changes]]]
"""By device, kernel and shape: what differs from the rule."""

TABLE = Path(__file__).with_name("tiles.json")
"""The tiles that were measured to be the fastest."""

TILES: dict[str, "Tiles"] = {}
"""By kernel."""


def measured_tiles(table: Path) -> Measured:
    """Return the tiles of a table: by device and kernel a list of objects with a `shape` and `changes`."""
    devices = json.loads(table.read_text(encoding="utf-8"))
    return {
        device: {kernel: {tuple(tile["shape"]): tile["changes"] for tile in of} for kernel, of in kernels.items()}
        for device, kernels in devices.items()
    }


MEASURED = measured_tiles(TABLE)


def tiles(kernel: str, **limits: tuple[int, int]) -> Callable[[Rule], "Tiles"]:
    """Register the rule of a kernel.

    The rule is called with changes, then with the numbers of a shape; it returns the tile with these changes in it, and
    what follows from them.

    Args:
        kernel: Its name.
        limits: What may be changed, by powers of two, and the least and the most of it.

    Raises:
        ValueError: If the kernel has a rule.
    """
    if kernel in TILES:
        raise ValueError(f"kernel {kernel!r} already has tiles; choose another name.")

    def decorate(rule: Rule) -> Tiles:
        TILES[kernel] = Tiles(kernel, rule, limits)
        return TILES[kernel]

    return decorate


class Tiles:
    """The tiles of a kernel, called with a device and the numbers of a shape.

    Args:
        kernel: Its name.
        rule: As in `tiles`.
        limits: As in `tiles`.
    """

    def __init__(self, kernel: str, rule: Rule, limits: Mapping[str, tuple[int, int]]):
        self.kernel, self.rule, self.limits = kernel, rule, limits
        self.known: dict[tuple[Any, ...], Tile] = {}

    def __call__(self, device: torch.device, *shape: Any) -> Tile:
        """Return the tile for a shape on a device, which must not be changed."""
        known = self.known.get((device, shape))
        if known is None:
            measured = MEASURED.get(_name_of(device), {}).get(self.kernel, {})
            known = self.known[device, shape] = self.rule(measured.get(shape, {}), *shape)
        return known


@functools.lru_cache
def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

"""Tiles of kernels: how much one program takes at a time, by a rule or as measured on the device.

A rule computes a tile from a shape: a few integers and booleans. Results are cached. Nothing is searched when a kernel
is first needed: `python -m benchmarks tiles` tries the few candidates that a rule allows, and writes the faster ones
into `tiles.json` under the name of the device.
"""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

# Values that replace a rule's values, by the name of a kernel's parameter or of a compiler option.
Changes = Mapping[str, int]
# Parameters of a kernel and compiler options, by name.
Tile = dict[str, Any]
Rule = Callable[..., Tile]
# Changes to the rule's tile, by device, kernel and shape.
Measured = dict[str, dict[str, dict[tuple[Any, ...], Changes]]]

# File of the tiles that were measured to be the fastest.
TABLE = Path(__file__).with_name("tiles.json")

# Tiles by the name of their kernel.
TILES: dict[str, "Tiles"] = {}


def measured_tiles(table: Path) -> Measured:
    """Return the tiles of a JSON file, which has per device and kernel a list of objects with a `shape` and `changes`."""
    devices = json.loads(table.read_text(encoding="utf-8"))
    return {
        device: {kernel: {tuple(tile["shape"]): tile["changes"] for tile in of} for kernel, of in kernels.items()}
        for device, kernels in devices.items()
    }


MEASURED = measured_tiles(TABLE)


def tiles(kernel: str, **limits: tuple[int, int]) -> Callable[[Rule], "Tiles"]:
    """Return a decorator that registers the rule of a kernel and turns the rule into `Tiles`.

    The rule is called with changes, then with the numbers of a shape. It returns a tile that contains the changes and
    all that follows from them.

    Args:
        kernel: Name of the kernel.
        limits: Per parameter that may be changed, its least and its greatest value; candidates differ by powers of two.

    Raises:
        ValueError: If the kernel already has a rule.
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
        kernel: Name of the kernel.
        rule: Function from changes and the numbers of a shape to a tile.
        limits: Least and greatest value of each parameter that may be changed.
    """

    def __init__(self, kernel: str, rule: Rule, limits: Mapping[str, tuple[int, int]]):
        self.kernel, self.rule, self.limits = kernel, rule, limits
        self.known: dict[tuple[Any, ...], Tile] = {}

    def __call__(self, device: torch.device, *shape: Any) -> Tile:
        """Return the tile for a shape on a device. The tile is cached: do not change it."""
        known = self.known.get((device, shape))
        if known is None:
            measured = MEASURED.get(_name_of(device), {}).get(self.kernel, {})
            known = self.known[device, shape] = self.rule(measured.get(shape, {}), *shape)
        return known


@functools.lru_cache
def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

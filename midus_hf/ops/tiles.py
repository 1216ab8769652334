"""Tiles of kernels: how much one of its programs takes at a time, by a rule, or as measured on the device.

A rule knows what is computed, in a few whole numbers and truth values, so what it says is kept. Nothing is searched when a kernel is
first needed: `python -m benchmarks tiles` tries the few candidates that a rule allows, and writes those that were faster into
`measured_tiles.py`, where they stand by the device's name.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from midus_hf.ops.measured_tiles import MEASURED

Changes = Mapping[str, int]
"""What differs from the rule, by the name of a kernel's parameter or of an option of the compiler."""
Tile = dict[str, Any]
"""Parameters of a kernel and options of the compiler."""
Rule = Callable[..., Tile]

TILES: dict[str, "Tiles"] = {}
"""By kernel."""


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
        self._known: dict[tuple[Any, ...], Tile] = {}
        self._tried: Changes | None = None
        self._asked: tuple[Any, ...] | None = None

    def __call__(self, device: torch.device, *shape: Any) -> Tile:
        """The tile for a shape on a device, which must not be changed."""
        if self._tried is not None:
            self._asked = shape
            return self.rule(self._tried, *shape)
        known = self._known.get((device, shape))
        if known is None:
            measured = MEASURED.get(_name_of(device), {}).get(self.kernel, {})
            known = self._known[device, shape] = self.rule(measured.get(shape, {}), *shape)
        return known

    def candidates(self, *shape: Any) -> list[Changes]:
        """What is worth trying for a shape: one size halved or doubled, or two together, which keeps what a thread has."""
        usual = self.rule({}, *shape)
        steps = [
            [(name, size) for size in (usual[name] // 2, usual[name] * 2) if least <= size <= most]
            for name, (least, most) in self.limits.items()
        ]
        alone = [{name: size} for sizes in steps for name, size in sizes]
        together = [
            {name: size, other: other_size}
            for sizes, other_sizes in itertools.combinations(steps, 2)
            for name, size in sizes
            for other, other_size in other_sizes
            if (size > usual[name]) == (other_size > usual[other])
        ]
        return [*alone, *together]

    @contextlib.contextmanager
    def trying(self, changes: Changes) -> Iterator[None]:
        """Take the rule's tiles with these changes, whatever was measured, for launches within, by whichever thread."""
        before = self._tried
        self._tried = changes
        try:
            yield
        finally:
            self._tried = before

    def asked(self, call: Callable[[], object]) -> tuple[Any, ...] | None:
        """The shape that a call asks these tiles for, by the rule's own; None where it does not ask."""
        self._asked = None
        with self.trying({}):
            call()
        return self._asked


@functools.lru_cache
def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

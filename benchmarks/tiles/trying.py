"""Candidate tiles of a kernel, and calls with these instead of the kernel's own tile."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from midus_hf.ops.dispatch.tiles import Changes, Rule, Tile, Tiles


def candidates(tiles: Tiles, *shape: Any) -> list[Changes]:
    """Return the changes to try for a shape: one size halved or doubled, or two of them together in the same direction.

    Two sizes that change together keep the work of a thread.
    """
    usual = _usual(tiles)({}, *shape)
    steps = [
        [(name, size) for size in (usual[name] // 2, usual[name] * 2) if least <= size <= most]
        for name, (least, most) in tiles.limits.items()
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
def trying(tiles: Tiles, changes: Changes, shapes: list[tuple[Any, ...]] | None = None) -> Iterator[None]:
    """Use the rule's tiles with some changes for all launches in the `with` block, whatever was measured and in all threads."""
    rule, known, usual = tiles.rule, tiles.known, _usual(tiles)

    def changed(_: Changes, *shape: Any) -> Tile:
        if shapes is not None:
            shapes.append(shape)
        return usual(changes, *shape)

    changed.usual = usual  # type: ignore[attr-defined]
    tiles.rule, tiles.known = changed, _KeepsNothing()
    try:
        yield
    finally:
        tiles.rule, tiles.known = rule, known


def shape_of_call(tiles: Tiles, call: Callable[[], object]) -> tuple[Any, ...] | None:
    """Return the shape for which the last launch of a call needs a tile, with the rule's own tiles; None without a launch."""
    shapes: list[tuple[Any, ...]] = []
    with trying(tiles, {}, shapes):
        call()
    return shapes[-1] if shapes else None


def _usual(tiles: Tiles) -> Rule:
    return getattr(tiles.rule, "usual", tiles.rule)


class _KeepsNothing(dict):
    def __setitem__(self, key: Any, value: Any) -> None:
        """Ignore the value, so that each launch calls the rule."""

"""Tiles that a kernel does not have of itself: which are worth trying, and how a call is made to take them."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from midus_hf.ops.dispatch.tiles import Changes, Rule, Tile, Tiles


def candidates(tiles: Tiles, *shape: Any) -> list[Changes]:
    """Return what is worth trying for a shape: one size halved or doubled, or two together, which keeps what a thread has."""
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
    """Take the rule's tiles with these changes, whatever was measured, for launches within, by whichever thread.

    Args:
        tiles: Of a kernel.
        changes: What differs from the rule.
        shapes: To which the shape of each launch is added. Default: none.
    """
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
    """Return the shape that a call asks these tiles for at its last launch, by the rule's own; None where there is none."""
    shapes: list[tuple[Any, ...]] = []
    with trying(tiles, {}, shapes):
        call()
    return shapes[-1] if shapes else None


def _usual(tiles: Tiles) -> Rule:
    return getattr(tiles.rule, "usual", tiles.rule)


class _KeepsNothing(dict):
    def __setitem__(self, key: Any, value: Any) -> None:
        """Keep nothing, so that each launch asks the rule."""

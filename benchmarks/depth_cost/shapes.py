"""Sizes of one layer that reads the depth, and what the paper measured of them (MoDA, tables 2 and 7)."""

import argparse
from dataclasses import dataclass

FILE = "depth_cost.csv"
KV_HEADS, WIDTH = 8, 64

WHATS = {
    "cpu": ("sequence", "merged", "depth", "bound"),
    "cuda": ("sequence", "usual", "merged", "merged-flash", "fused", "depth", "bound"),
}
"""What is timed, by device, where nothing else is asked for."""
JOINED = ("merged", "merged-flash", "merged-flex", "fused")
"""Those that read both."""


@dataclass(frozen=True)
class Shape:
    """Tokens of a text, query heads for each head of keys and values, slots of the depth."""

    tokens: int
    group: int
    slots: int

    def __str__(self) -> str:
        return f"{self.tokens}x{self.group}x{self.slots}"


PAPER = {
    Shape(65536, 8, 64): (1831.668, 1883.026),
    Shape(4096, 8, 64): (7.970, 10.750),
    Shape(16384, 8, 256): (116.700, 167.958),
    Shape(16384, 8, 64): (116.700, 127.661),
    Shape(1024, 8, 64): None,
    Shape(8192, 8, 64): (28.700, 35.427),
    Shape(32768, 8, 64): (459.854, 480.914),
    Shape(16384, 8, 128): (116.700, 138.224),
    Shape(16384, 2, 64): (28.982, 39.741),
    Shape(16384, 4, 64): (58.071, 68.939),
    Shape(16384, 16, 64): (233.700, 244.900),
    Shape(16384, 32, 64): (467.107, 480.767),
}
"""Milliseconds of the sequence alone and with the depth, on an A100 (table 2); of one shape table 7 has no sequence alone. Those that
goals are set for come first."""

DEFAULT_SHAPES = {
    "cpu": (Shape(2048, 2, 32),),
    "cuda": tuple(PAPER),
    "rehearsal": (Shape(3, 8, 3), Shape(2, 32, 2), Shape(3, 2, 5)),
}


def shapes(text: str) -> tuple[Shape, ...]:
    """Read shapes as the command line has them."""
    found = []
    for part in text.split(","):
        sizes = part.split("x")
        if len(sizes) != 3 or not all(size.isdecimal() and int(size) for size in sizes):
            raise argparse.ArgumentTypeError(
                f"{part!r} is no shape; expected tokens x group x slots, as in 4096x8x64."
            )
        found.append(Shape(*map(int, sizes)))
    return tuple(found)


def whats(text: str) -> tuple[str, ...]:
    """Read what shall be timed, as the command line has it."""
    known = dict.fromkeys((*WHATS["cuda"], *JOINED))
    asked = tuple(text.split(","))
    for name in asked:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is not timed; expected some of {', '.join(known)}.")
    return asked

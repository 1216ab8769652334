"""Sizes of a layer that reads the depth, and the paper's measurements at these sizes (MoDA, tables 2 and 7)."""

import argparse
from dataclasses import dataclass

FILE = "depth_cost.csv"
KV_HEADS, WIDTH = 8, 64

# Ways that are timed by default, by device.
WHATS = {
    "cpu": ("sequence", "merged", "depth", "bound"),
    "cuda": ("sequence", "usual", "merged", "merged-flash", "depth", "bound"),
}
# Ways that read sequence and depth.
JOINED = ("merged", "merged-flash", "merged-flex")


@dataclass(frozen=True)
class Shape:
    """Numbers of tokens in a text, of query heads per key/value head, and of slots of the depth."""

    tokens: int
    group: int
    slots: int

    def __str__(self) -> str:
        return f"{self.tokens}x{self.group}x{self.slots}"


# Milliseconds of the sequence alone and with the depth, on an A100 (table 2). One shape has no time of the sequence
# alone (table 7). Shapes that have goals come first.
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

DEFAULT_SHAPES = {
    "cpu": (Shape(2048, 2, 32),),
    "cuda": tuple(PAPER),
}


def shapes(text: str) -> tuple[Shape, ...]:
    """Parse shapes of the command line, such as `4096x8x64,16384x8x256`."""
    parsed = []
    for part in text.split(","):
        sizes = part.split("x")
        if len(sizes) != 3 or not all(size.isdecimal() and int(size) for size in sizes):
            raise argparse.ArgumentTypeError(
                f"{part!r} is no shape; expected tokens x group x slots, as in 4096x8x64."
            )
        parsed.append(Shape(*map(int, sizes)))
    return tuple(parsed)


def whats(text: str) -> tuple[str, ...]:
    """Parse the names of ways on the command line, joined by commas."""
    known = dict.fromkeys((*WHATS["cuda"], *JOINED))
    names = tuple(text.split(","))
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is not timed; expected some of {', '.join(known)}.")
    return names

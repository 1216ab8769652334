"""A canvas on which boxes, arrows and residual streams are drawn, in one style for all pictures."""

from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Rectangle
from matplotlib.path import Path as Line

# Points, so that a picture of 700 pixels has letters as large as a page's small print.
WIDTH = 700
TEXT, SMALL, TITLE = 11.5, 10.5, 12.5
INK, FAINT, BLUE, RED = "#1c1e21", "#4a5360", "#2458a8", "#b3261e"
# Fill and edge of boxes, by what a box holds.
FILLS = {
    "base": ("#e9edf3", "#8c98a8"),
    "new": ("#dbe9ff", BLUE),
    "table": ("#fdf0d5", "#b26b00"),
    "none": ("#ffffff", FAINT),
}


class Box(NamedTuple):
    """A rectangle on the picture, in points from the lower left corner of the picture."""

    x: float
    y: float
    width: float
    height: float

    @property
    def left(self) -> tuple[float, float]:
        """Middle of the left edge."""
        return self.x, self.y + self.height / 2

    @property
    def right(self) -> tuple[float, float]:
        """Middle of the right edge."""
        return self.x + self.width, self.y + self.height / 2

    @property
    def top(self) -> tuple[float, float]:
        """Middle of the upper edge."""
        return self.x + self.width / 2, self.y + self.height

    @property
    def bottom(self) -> tuple[float, float]:
        """Middle of the lower edge."""
        return self.x + self.width / 2, self.y


class Picture:
    """A picture of boxes and arrows, 700 points wide.

    Args:
        height: Height in points.
    """

    def __init__(self, height: float):
        self.height = height
        self.figure = Figure(figsize=(WIDTH / 72, height / 72), facecolor="white")
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, WIDTH), ylim=(0, height))
        self.axes.axis("off")

    def text(
        self, x: float, y: float, text: str, size: float = TEXT, color: str = INK, ha: str = "center", **font: Any
    ) -> None:
        """Write text around the height y."""
        if "\n" in text:
            self.axes.text(
                x, y, text, fontsize=size, color=color, ha=ha, va="center", linespacing=1.3, zorder=7, **font
            )
        else:  # by the baseline, so that neighbours with and without descenders stand on one line
            self.axes.text(
                x, y - 0.36 * size, text, fontsize=size, color=color, ha=ha, va="baseline", zorder=7, **font
            )

    def title(self, x: float, text: str) -> None:
        """Write a heading at the upper edge."""
        self.text(x, self.height - 14, text, TITLE, ha="left", fontweight="bold")

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        text: str = "",
        kind: str = "base",
        zero: bool = False,
        size: float = TEXT,
    ) -> Box:
        """Draw a box and return where the box lies; `zero` marks parameters that are zero at the start."""
        fill, edge = FILLS[kind]
        style = {"edgecolor": RED, "linestyle": (0, (4, 2)), "linewidth": 1.6} if zero else {"edgecolor": edge}
        rounded = FancyBboxPatch(
            (x + 3, y + 3), width - 6, height - 6, boxstyle="round,pad=3", facecolor=fill, zorder=3, **style
        )
        self.axes.add_patch(rounded)
        if text:
            self.text(x + width / 2, y + height / 2, text, size)
        return Box(x, y, width, height)

    def frame(self, x: float, y: float, width: float, height: float, text: str = "") -> Box:
        """Draw a dashed frame around what belongs together, with a caption in the upper left corner."""
        self.axes.add_patch(
            Rectangle(
                (x, y),
                width,
                height,
                facecolor="#f7faff",
                edgecolor=BLUE,
                linestyle=(0, (5, 3)),
                linewidth=1,
                zorder=1,
            )
        )
        self.text(x + 8, y + height - 12, text, SMALL, BLUE, "left")
        return Box(x, y, width, height)

    def arrow(self, *points: tuple[float, float], color: str = FAINT, tip: bool = True, width: float = 1.2) -> None:
        """Draw a line through points, with a tip at the last point."""
        self.axes.add_patch(
            FancyArrowPatch(
                path=Line(points),
                arrowstyle="-|>" if tip else "-",
                mutation_scale=9,
                color=color,
                linewidth=width,
                joinstyle="round",
                shrinkA=0,
                shrinkB=0,
                zorder=2,
            )
        )

    def stream(self, x: float, bottom: float, top: float) -> None:
        """Draw the residual stream as a thick line upwards."""
        self.arrow((x, bottom), (x, top), color=INK, width=2.4)

    def plus(self, x: float, y: float) -> None:
        """Draw a sum on the residual stream."""
        self.axes.add_patch(Circle((x, y), 8, facecolor="white", edgecolor=INK, linewidth=1.4, zorder=5))
        for ends in (((x - 4.5, x + 4.5), (y, y)), ((x, x), (y - 4.5, y + 4.5))):
            self.axes.plot(*ends, color=INK, linewidth=1.4, zorder=6)

    def branch(self, x: float, y: float, box: Box, back: float) -> None:
        """Draw a branch of the residual stream at x: into a box from the height y, and back at a sum at another height."""
        self.arrow((x, y), (box.bottom[0], y), box.bottom)
        self.arrow(box.top, (box.top[0], back), (x + 8, back))
        self.plus(x, back)

    def legend(self, *entries: str) -> None:
        """Explain boxes at the lower edge: `base`, `new`, `table` or `zero`."""
        meanings = {
            "base": "the base",
            "new": "new",
            "table": "new parameters that are looked up",
            "zero": "zero at the start",
        }
        x = 14.0
        for entry in entries:
            self.box(x, 8, 20, 13, kind="none" if entry == "zero" else entry, zero=entry == "zero")
            self.text(x + 27, 14.5, meanings[entry], SMALL, FAINT, "left")
            x += 48 + 5.9 * len(meanings[entry])

"""What pictures of models, trees and comparisons are made with. All of it needs matplotlib."""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

PICTURE_SUFFIXES = (".png", ".svg", ".pdf")
"""Of files that a picture may be drawn into."""

HEAT = {"aspect": "auto", "interpolation": "nearest"}
"""How maps of numbers are drawn: as wide as there is room for, a patch per number."""


def new_figure(width: float, height: float, layout: Literal["constrained"] | None = "constrained") -> Any:
    """Return an empty figure of so many inches; without a `layout` what is drawn keeps the margins that matplotlib begins with."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=120, layout=layout)


def as_png(figure: Any, tight: bool = True) -> bytes:
    """Return a picture as PNG, `tight` around what is drawn."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", bbox_inches="tight" if tight else None)
    return stream.getvalue()


def label_some(ticks: Callable[..., Any], names: Sequence[str], most: int = 16) -> None:
    """Write names beside an axis, so many at most.

    Args:
        ticks: `set_xticks` or `set_yticks` of the axes.
        names: From the first place on.
        most: How many of them, evenly spread. Default: 16.
    """
    step = math.ceil(len(names) / most)
    ticks(range(0, len(names), step), names[::step], fontsize="small")


def draw_curves(axes: Any, curves: "Mapping[str, torch.Tensor]", styles: Sequence[Mapping[str, Any]]) -> None:
    """Draw how often each of some things is used, the most used first, in multiples of the mean.

    Args:
        axes: To draw on.
        curves: `[N]` in multiples of the mean, descending, by what the legend calls each.
        styles: Of the line of each.
    """
    for (label, curve), style in zip(curves.items(), styles, strict=True):
        ranks = [rank / len(curve) for rank in range(1, len(curve) + 1)]
        axes.plot(ranks, curve.tolist(), linewidth=1.5, label=label, **style)
    axes.axhline(1, color="#888888", linewidth=1, linestyle="--", label="all alike")
    axes.set_yscale("symlog", linthresh=0.1)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)

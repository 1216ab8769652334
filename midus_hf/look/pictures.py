"""Tools for pictures of models, trees and comparisons. All functions need matplotlib."""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

# Suffixes of files that a picture may be drawn into.
PICTURE_SUFFIXES = (".png", ".svg", ".pdf")

# Arguments of `imshow` for maps of numbers, which fill the axes with one patch per number.
HEAT = {"aspect": "auto", "interpolation": "nearest"}


def new_figure(width: float, height: float, layout: Literal["constrained"] | None = "constrained") -> Any:
    """Return an empty figure, with width and height in inches. Without a `layout` it has matplotlib's default margins."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=120, layout=layout)


def as_png(figure: Any, tight: bool = True) -> bytes:
    """Return a figure as PNG; `tight` cuts empty margins off."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", bbox_inches="tight" if tight else None)
    return stream.getvalue()


def save_figures(path: Path, figures: Sequence[Any]) -> None:
    """Write one figure or more to a file: as the pages of a `.pdf`, or one below another in a `.png`."""
    if path.suffix == ".pdf":
        from matplotlib.backends.backend_pdf import PdfPages

        with PdfPages(path) as pages:
            for figure in figures:
                pages.savefig(figure, bbox_inches="tight")
        return
    from PIL import Image  # which matplotlib needs as well

    pictures = [Image.open(io.BytesIO(as_png(figure))) for figure in figures]
    joined = Image.new("RGB", (max(each.width for each in pictures), sum(each.height for each in pictures)), "white")
    top = 0
    for picture in pictures:
        joined.paste(picture, (0, top))
        top += picture.height
    joined.save(path)


def label_some(ticks: Callable[..., Any], names: Sequence[str], most: int = 16) -> None:
    """Label an axis with names of positions 0, 1, 2 and so on, or with `most` names, evenly spread, if there are more.

    `ticks` is the method `set_xticks` or `set_yticks` of the axes.
    """
    step = math.ceil(len(names) / most)
    ticks(range(0, len(names), step), names[::step], fontsize="small")


def draw_curves(axes: Any, curves: "Mapping[str, torch.Tensor]", styles: Sequence[Mapping[str, Any]]) -> None:
    """Draw curves of how often things are used, most used first, in multiples of the mean.

    Args:
        axes: Axes to draw on.
        curves: Curves `[N]` in multiples of the mean, descending, by their names in the legend.
        styles: Style of each curve's line, as keyword arguments of `plot`.
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

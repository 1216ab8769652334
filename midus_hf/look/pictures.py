"""Pictures of models and comparisons: panels of curves, bars and maps. All functions need matplotlib."""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# A function that draws on matplotlib's axes, which already have the panel's title.
Panel = Callable[[Any], None]


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure, with width and height in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def as_png(figure: Any) -> bytes:
    """Return a figure as PNG, without empty margins."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", bbox_inches="tight")
    return stream.getvalue()


def draw_panels(panels: Mapping[str, Panel], one_scale: bool = False) -> Any:
    """Return a figure of panels side by side, each under its title; with `one_scale`, all have the axes of the first."""
    figure = new_figure(1 + 4 * len(panels), 3.6)
    rows = figure.subplots(1, len(panels), squeeze=False, sharex=one_scale, sharey=one_scale)
    for axes, (title, draw) in zip(rows[0], panels.items(), strict=True):
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=7)
        draw(axes)
        if one_scale:
            axes.label_outer()
    return figure


def curves(lines: Mapping[str, tuple[Sequence[float], Sequence[float]]], x: str, y: str, **axis: Any) -> Panel:
    """Return a panel of curves, each the values of x and of y by its name; `axis` are properties of the axes."""

    def draw(axes: Any) -> None:
        for name, (xs, ys) in lines.items():
            axes.plot(xs, ys, linewidth=1.5, marker="." if len(xs) < 40 else "", label=name)
        axes.set(xlabel=x, ylabel=y, **axis)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.legend(frameon=False, fontsize=7, ncols=1 + len(lines) // 8)
        axes.grid(alpha=0.25)

    return draw


def bars(lengths: Mapping[str, tuple[float, float]], x: str, total: str) -> Panel:
    """Return a panel of horizontal bars, each a length and its standard error by its name, the first on top, the `total` grey."""

    def draw(axes: Any) -> None:
        values, errors = zip(*lengths.values(), strict=True)
        colors = ["#888888" if name == total else "#c44e52" for name in lengths]
        axes.barh(list(lengths), values, xerr=errors, color=colors, ecolor="#333333")
        axes.axvline(0, color="#333333", linewidth=0.8)
        axes.set_ylim(len(lengths) - 0.4, -0.6)
        axes.set_xlabel(f"{x}\nthin lines: ± one standard error over rows of the text", fontsize=8)

    return draw


def grid(
    rows: Sequence[Sequence[float]],
    x: str,
    y: str,
    *,
    columns: Sequence[str],
    lines: Sequence[str],
    most: float | None = None,
    boundary: float | None = None,
) -> Panel:
    """Return a panel with a coloured field per number, the lightest for `most`, and a line before column `boundary`."""

    def draw(axes: Any) -> None:
        least = None if most is None else 0
        image = axes.imshow(rows, aspect="auto", interpolation="nearest", vmin=least, vmax=most)
        axes.figure.colorbar(image, ax=axes)
        for ticks, names in ((axes.set_xticks, columns), (axes.set_yticks, lines)):
            step = math.ceil(len(names) / 16)
            ticks(range(0, len(names), step), names[::step])
        if boundary is not None:
            axes.axvline(boundary - 0.5, color="#d62728", linestyle="--", linewidth=1)
        axes.set(xlabel=x, ylabel=y)

    return draw

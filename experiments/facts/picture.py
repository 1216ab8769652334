"""A picture of reports: right answers on the x axis, the loss on articles on the y axis."""

import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.facts.questions import WORDINGS
from midus_hf.look.page import as_png, new_figure

BESIDE_LINE: dict[str, Any] = {
    "textcoords": "offset points",
    "ha": "right",
    "va": "top",
    "rotation": 90,
    "fontsize": 8,
}


def draw(lines: Sequence[dict[str, Any]]) -> bytes:
    """Return a picture of reports as PNG: right answers in the wordings of a fact, and the change of the loss on articles."""
    runs: dict[str, list[list[float]]] = {}
    figure = new_figure(8.0, 4.5)
    axes = figure.subplots()
    for report in lines:
        counts = [each for kind, each in report["right"].items() if kind in WORDINGS] or list(report["right"].values())
        share = sum(right for right, _ in counts) / sum(asked for _, asked in counts)
        if "articles without" in report:
            nats = [report[f"articles {kind}"]["nats"] for kind in ("with a name", "without")]
            runs.setdefault(re.sub(r"-\d+$", "", Path(report["model"]).name), []).append([share, *nats])
        else:
            axes.axvline(share, color="#888888", linewidth=1.0, linestyle=":", zorder=0)
            axes.annotate(report["model"], (share, 0.97), (-3, 0), xycoords=("data", "axes fraction"), **BESIDE_LINE)
    for number, (label, points) in enumerate(runs.items()):
        shares, touched, others = zip(*points, strict=True)
        mark: dict[str, Any] = {"color": f"C{number}", "fmt": "o", "capsize": 3}
        axes.errorbar(**_ranges(shares, touched), **mark, label=label)
        axes.errorbar(**_ranges(shares, others), **mark, markerfacecolor="white")
    axes.set(
        xlabel="right answers, of all wordings",
        ylabel="change of the loss of articles (nats per token)",
        xlim=(0, 1.03),
    )
    axes.set_title("filled: articles with a name; hollow: others; bars: range of seeds", fontsize=9, loc="left")
    axes.legend(fontsize=9, frameon=False, loc="upper center")
    axes.spines[["top", "right"]].set_visible(False)
    return as_png(figure)


def _ranges(xs: Sequence[float], ys: Sequence[float]) -> dict[str, Any]:
    means = [statistics.fmean(values) for values in (xs, ys)]
    below_and_above = [
        [[mean - min(values)], [max(values) - mean]] for mean, values in zip(means, (xs, ys), strict=True)
    ]
    return dict(zip(("x", "y", "xerr", "yerr"), (*([mean] for mean in means), *below_and_above), strict=True))

"""A picture of what is left of a bank's facts while its best blocks are blocked, as figure 6b. Needs matplotlib."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

_PANELS = {"accuracy": "atomic numbers, share that is right", "loss": "loss of the sentence, nats per token"}


def draw_blocking(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw accuracy and loss by the share of the bank that is blocked for each text.

    Args:
        rows: Each with `arm`, `blocked`, `nodes`, `accuracy` and `loss`. An arm that has one row, since blocking makes no difference
            to it, is a dashed line.
        path: The file to write, of a kind that matplotlib knows.
    """
    shares = sorted({_share(row) for row in rows})
    figure = Figure(figsize=(10, 4), dpi=120)
    for axes, (measure, label) in zip(figure.subplots(1, 2), _PANELS.items(), strict=True):
        for index, arm in enumerate(dict.fromkeys(row["arm"] for row in rows)):
            points = sorted((_share(row), row[measure]) for row in rows if row["arm"] == arm)
            if len(points) == 1:
                axes.axhline(points[0][1], linestyle="--", color=f"C{index}", label=arm)
            else:
                # As far apart on paper, since shares are powers of the number of children.
                places = [shares.index(share) for share, _ in points]
                axes.plot(places, [value for _, value in points], "o-", color=f"C{index}", label=arm)
        axes.set_xticks(range(len(shares)), [str(share) for share in shares])
        axes.set_xlabel("share of the tree that is blocked, best nodes first")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)


def _share(row: dict[str, Any]) -> Fraction:
    return Fraction(row["blocked"], row["nodes"])

"""Picture of a tree: a row of boxes per level, in which the width of a box shows how many windows the node has."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from midus_hf.look.pictures import new_figure
from midus_hf.topics.report import commonest_labels

# Share of the picture's width that one character takes.
_CHARACTER = 0.0047


def draw_tree(
    branching: int,
    levels: int,
    leaves: np.ndarray,
    path: Path,
    labels: np.ndarray | None = None,
    label_names: Sequence[str] = (),
) -> None:
    """Draw a tree with the first level at the top and children below their node. Requires matplotlib.

    With labels, a box has the colour of the node's commonest label, and wide boxes show the label's name. Without labels, a
    box has the colour of its node of level 1.

    Args:
        leaves: The leaf of each window, `[N]`.
        labels: The label of each window, `[N]`, as an index into `label_names`. Default: None.
    """
    from matplotlib import colormaps

    figure = new_figure(10, 1.2 + 0.8 * levels)
    axes = figure.subplots()
    colours = colormaps["turbo"]
    hues = (branching if labels is None else len(label_names)) - 1
    for level in range(1, levels + 1):
        nodes = np.asarray(leaves, np.int64) // branching ** (levels - level)
        present, sizes = np.unique(nodes, return_counts=True)
        begins = np.concatenate([[0], np.cumsum(sizes)[:-1]]) / len(nodes)
        widths = sizes / len(nodes)
        commonest = {} if labels is None else commonest_labels(nodes, labels)
        kinds = [commonest.get(node, node // branching ** (level - 1)) for node in present.tolist()]
        axes.broken_barh(
            list(zip(begins.tolist(), widths.tolist(), strict=True)),
            (-level + 0.05, 0.9),
            facecolors=[colours(_hue(kind, hues)) for kind in kinds],
            edgecolors="white",
            linewidth=0.8 / level if len(present) < 1000 else 0,
        )
        for node, kind, begin, width in zip(present.tolist(), kinds, begins, widths, strict=True):
            label = "" if labels is None else label_names[kind]
            lines = [text for text in (str(node), label) if text and _CHARACTER * len(text) < width]
            red, green, blue, _ = colours(_hue(kind, hues))
            axes.text(
                begin + width / 2,
                -level + 0.5,
                "\n".join(lines),
                color="black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white",
                fontsize=6,
                ha="center",
                va="center",
            )
    axes.set_xlim(0, 1)
    axes.set_ylim(-levels, 0)
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.set_xlabel("windows of the corpus")
    axes.set_yticks(
        [-level + 0.5 for level in range(1, levels + 1)], [f"level {level}" for level in range(1, levels + 1)]
    )
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.savefig(path)


def _hue(kind: int, last: int) -> float:
    """Return the position of a number's colour in a colour map. Neighbouring numbers get distant colours."""
    steps = last + 1
    stride = next(
        stride for stride in range(max(1, round(0.38 * steps)), 2 * steps + 1) if math.gcd(stride, steps) == 1
    )
    return 0.05 + 0.9 * (kind * stride % steps) / max(1, last)

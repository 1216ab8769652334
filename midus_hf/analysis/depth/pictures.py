"""Pictures of what heads read of the depth, as matplotlib figures. All functions need matplotlib."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from midus_hf.analysis.depth.map import DepthMap
from midus_hf.analysis.depth.readers import ReadSlot
from midus_hf.analysis.depth.reading import DepthReading
from midus_hf.analysis.pictures import HEAT, label_some, new_figure

_WIDTH = 12.0
_COLUMNS = 2
# Style of the line between the sequence and the depth.
_BOUNDARY = {"color": "#d62728", "linestyle": "--", "linewidth": 1}

_LEGEND = "seq: the sequence; 2a: what attention of layer 2 wrote; 2f: what was projected from the input of its feed-forward network"


class Part(NamedTuple):
    """Part of a picture.

    Args:
        height: Height in inches.
        draw: Function that draws the part on a figure.
    """

    height: float
    draw: Callable[[Any], None]


def depth_parts(readings: Sequence[DepthReading], of_head: DepthMap | None = None) -> dict[str, Part]:
    """Return the parts of a picture of what heads read of the depth, by the title of each part.

    Args:
        readings: Readings, as `depth_readings` returns them.
        of_head: Map of one head, as `depth_map` returns it. Default: no map is drawn.
    """
    parts = {"Layers by layers": _writers_part(readings), "Heads by slots": _heads_part(readings)}
    if of_head is not None:
        parts[f"Layer {of_head.layer}, head {of_head.head}: tokens by keys and slots"] = _map_part(of_head)
    return parts


def draw_parts(parts: Iterable[Part]) -> Any:
    """Return a figure of parts of a picture, one below another."""
    parts = list(parts)
    heights = [part.height for part in parts]
    figure = new_figure(_WIDTH, sum(heights))
    own_figures = figure.subfigures(len(parts), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, own in zip(parts, own_figures, strict=True):
        part.draw(own)
    return figure


def _writers_part(readings: Sequence[DepthReading]) -> Part:
    """Return the part that shows what layers read of earlier layers, averaged over heads: a map per kind of slot."""
    slots = list(dict.fromkeys(slot for reading in readings for slot in reading.slots))
    by_source: dict[str, list[ReadSlot]] = {}
    for slot in slots:
        by_source.setdefault(slot.source, []).append(slot)

    def draw(figure: Any) -> None:
        maps = {
            source: [[_or_blank(reading.share_of(slot)) for slot in of_source] for reading in readings]
            for source, of_source in by_source.items()
        }
        most = max(share for rows in maps.values() for row in rows for share in row if not math.isnan(share))
        panels = figure.subplots(1, len(maps), squeeze=False, sharey=True)[0]
        image: Any = None
        for axes, (source, rows) in zip(panels, maps.items(), strict=True):
            image = axes.imshow(rows, cmap="viridis", vmin=0, vmax=most or 1, **HEAT)
            axes.set_title(f"slots of {source}", fontsize="medium")
            label_some(axes.set_xticks, [str(slot.layer) for slot in by_source[source]])
            axes.set_xlabel("written by layer")
        label_some(panels[0].set_yticks, [str(reading.layer) for reading in readings])
        panels[0].set_ylabel("read by layer")
        figure.colorbar(image, ax=list(panels), label="share of attention,\nmean over heads")

    return Part(1.6 + 0.2 * len(readings), draw)


def _heads_part(readings: Sequence[DepthReading]) -> Part:
    """Return the part that shows what each head reads of the sequence and of each slot: a map per layer, a row per head."""
    lines = math.ceil(len(readings) / _COLUMNS)

    def draw(figure: Any) -> None:
        panels = list(figure.subplots(lines, _COLUMNS, squeeze=False).flat)
        image: Any = None
        for axes, reading in zip(panels, readings, strict=False):
            rows = [
                [sequence, *of_head] for sequence, of_head in zip(reading.sequence_shares, reading.shares, strict=True)
            ]
            image = axes.imshow(rows, cmap="magma", norm=_norm(), **HEAT)
            axes.axvline(0.5, **_BOUNDARY)
            axes.set_title(f"layer {reading.layer}: heads by the sequence and slots", fontsize="small", loc="left")
            label_some(axes.set_xticks, ["seq", *map(_short, reading.slots)])
            label_some(axes.set_yticks, list(map(str, reading.heads)))
        for axes in panels[len(readings) :]:
            axes.set_axis_off()
        figure.supxlabel(_LEGEND, fontsize="small")
        figure.colorbar(image, ax=panels, label="share of attention")

    return Part(0.3 + lines * (1.0 + 0.09 * len(readings[0].heads)), draw)


def _map_part(of_head: DepthMap) -> Part:
    """Return the part that shows what each token reads of each key of the sequence and each slot, in one head."""

    def draw(figure: Any) -> None:
        tokens, slots = of_head.depth.shape
        sequence, depth = figure.subplots(1, 2, sharey=True, width_ratios=[4, min(4.0, max(1.0, 4 * slots / tokens))])
        norm = _norm(max(of_head.sequence.max().item(), of_head.depth.max().item()))
        image = sequence.imshow(of_head.sequence.tolist(), cmap="magma", norm=norm, **HEAT)
        depth.imshow(of_head.depth.tolist(), cmap="magma", norm=norm, **HEAT)
        sequence.set_title(f"layer {of_head.layer}, head {of_head.head}: the sequence", fontsize="medium", loc="left")
        depth.set_title("the depth", fontsize="medium", loc="left")
        sequence.set_ylabel("query")
        sequence.set_xlabel("key")
        label_some(depth.set_xticks, list(map(_short, of_head.slots)), 8)
        depth.axvline(-0.5, **_BOUNDARY)
        figure.colorbar(image, ax=[sequence, depth], label="share of attention")

    return Part(6.0, draw)


def _norm(most: float = 1) -> Any:
    """Return a scale of colours by the square root of a share, so that the small shares of many slots can be seen."""
    from matplotlib.colors import PowerNorm

    return PowerNorm(0.5, vmin=0, vmax=most)


def _short(slot: ReadSlot) -> str:
    return f"{slot.layer}{slot.source[0]}"


def _or_blank(share: float | None) -> float:
    return math.nan if share is None else share

"""Results about attention to the depth as tables, JSON and pictures. Pictures need matplotlib."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from midus_hf.look.depth import DepthMap, DepthReading, ReadSlot, WriterReading
from midus_hf.look.page import TableOfWords
from midus_hf.look.pictures import HEAT, label_some, new_figure

HOW_TO_READ = (
    "A head reads keys of the sequence and slots of the depth. The share of a key or slot is the weight that the head multiplies its "
    "value with, the gate included, averaged over tokens. Shares tell what is read, and not what is added: a slot whose value is "
    "short, or that the output projection leaves out, adds little."
)
# Number of slots per layer that the table names.
_MOST_SLOTS = 3
# Width of pictures in inches, and number of layers beside one another.
_WIDTH, _COLUMNS = 12.0, 2
# Style of the line between the sequence and the depth.
_BOUNDARY = {"color": "#d62728", "linestyle": "--", "linewidth": 1}
_LEGEND = "seq: the sequence; 2a: what attention of layer 2 wrote; 2f: what was projected from the input of its feed-forward network"


def layers_table(readings: Sequence[DepthReading]) -> TableOfWords:
    """Return a table of what each layer reads of the depth: the shares per kind of slot, and the slots that are read most."""
    sources = list(dict.fromkeys(slot.source for reading in readings for slot in reading.slots))
    rows = []
    for reading in readings:
        head, share = reading.most_depth
        by_slot = sorted(zip(reading.mean_shares, map(str, reading.slots), strict=True), key=lambda pair: -pair[0])
        rows.append(
            [
                str(reading.layer),
                f"{reading.mean_depth_share:.1%}",
                f"{share:.1%} ({head})",
                f"{reading.mean_sequence_share:.1%}",
                f"{min(reading.gates):.3g} to {max(reading.gates):.3g}",
                *(f"{reading.share_of_source(source):.1%}" for source in sources),
                ", ".join(f"{slot} {share:.1%}" for share, slot in by_slot[:_MOST_SLOTS] if share) or "nothing",
            ]
        )
    head_row = ["layer", "depth", "largest (head)", "sequence", "gate", *sources, "reads most"]
    return TableOfWords("Shares of the depth and of the sequence, the mean over tokens and heads", head_row, rows)


def writers_table(slot_readings: Sequence[WriterReading], most: int | None = None) -> TableOfWords:
    """Return a table of the slots that later layers read most, `most` at most. Default: all slots."""
    rows = [
        [
            str(writer.slot),
            str(writer.readers),
            f"{writer.mean_share:.2%}",
            f"{writer.most_share:.2%} ({writer.most_layer})",
        ]
        for writer in slot_readings[:most]
    ]
    return TableOfWords("Slots that are read most", ["slot", "layers", "share", "largest (layer)"], rows)


def as_json(readings: Sequence[DepthReading], slot_readings: Sequence[WriterReading]) -> dict[str, Any]:
    """Return everything in both kinds of readings as dictionaries and lists for JSON."""
    return {
        "layers": [
            {
                "layer": reading.layer,
                "memory": reading.memory,
                "tokens": reading.tokens,
                "heads": list(reading.heads),
                "gates": reading.gates,
                "depth_shares": reading.depth_shares,
                "sequence_shares": reading.sequence_shares,
                "slots": [slot._asdict() for slot in reading.slots],
                "shares": reading.shares,
            }
            for reading in readings
        ],
        "writers": [
            {**writer.slot._asdict(), **{key: value for key, value in vars(writer).items() if key != "slot"}}
            for writer in slot_readings
        ],
    }


def depth_pictures(readings: Sequence[DepthReading], of_head: DepthMap | None = None) -> dict[str, Callable[[], Any]]:
    """Return functions that draw what heads read of the depth, by the titles of the figures.

    Args:
        readings: Readings, as `depth_readings` returns them.
        of_head: Map of one head, as `depth_map` returns it. Default: no map is drawn.
    """
    drawers: dict[str, Callable[[], Any]] = {
        "Layers by layers": partial(_draw_writers, readings),
        "Heads by slots": partial(_draw_heads, readings),
    }
    if of_head is not None:
        title = f"Layer {of_head.layer}, head {of_head.head}: tokens by keys and slots"
        drawers[title] = partial(_draw_map, of_head)
    return drawers


def _draw_writers(readings: Sequence[DepthReading]) -> Any:
    """Return a figure of what layers read of earlier layers, averaged over heads: a map per kind of slot."""
    by_source: dict[str, list[ReadSlot]] = {}
    for slot in dict.fromkeys(slot for reading in readings for slot in reading.slots):
        by_source.setdefault(slot.source, []).append(slot)
    maps = {
        source: [[_or_blank(reading.share_of(slot)) for slot in of_source] for reading in readings]
        for source, of_source in by_source.items()
    }
    most = max(share for rows in maps.values() for row in rows for share in row if not math.isnan(share))
    figure = new_figure(_WIDTH, 1.6 + 0.2 * len(readings))
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
    return figure


def _draw_heads(readings: Sequence[DepthReading]) -> Any:
    """Return a figure of what each head reads of the sequence and of each slot: a map per layer, a row per head."""
    lines = math.ceil(len(readings) / _COLUMNS)
    figure = new_figure(_WIDTH, 0.3 + lines * (1.0 + 0.09 * len(readings[0].heads)))
    panels = list(figure.subplots(lines, _COLUMNS, squeeze=False).flat)
    image: Any = None
    for axes, reading in zip(panels, readings, strict=False):
        rows = [[sequence, *slots] for sequence, slots in zip(reading.sequence_shares, reading.shares, strict=True)]
        image = axes.imshow(rows, cmap="magma", norm=_norm(), **HEAT)
        axes.axvline(0.5, **_BOUNDARY)
        axes.set_title(f"layer {reading.layer}: heads by the sequence and slots", fontsize="small", loc="left")
        label_some(axes.set_xticks, ["seq", *map(_short, reading.slots)])
        label_some(axes.set_yticks, list(map(str, reading.heads)))
    for axes in panels[len(readings) :]:
        axes.set_axis_off()
    figure.supxlabel(_LEGEND, fontsize="small")
    figure.colorbar(image, ax=panels, label="share of attention")
    return figure


def _draw_map(of_head: DepthMap) -> Any:
    """Return a figure of what each token reads of each key of the sequence and each slot, in one head."""
    tokens, slots = of_head.depth.shape
    figure = new_figure(_WIDTH, 6.0)
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
    return figure


def _norm(most: float = 1) -> Any:
    """Return a scale of colours by the square root of a share, so that the small shares of many slots can be seen."""
    from matplotlib.colors import PowerNorm

    return PowerNorm(0.5, vmin=0, vmax=most)


def _short(slot: ReadSlot) -> str:
    return f"{slot.layer}{slot.source[0]}"


def _or_blank(share: float | None) -> float:
    return math.nan if share is None else share

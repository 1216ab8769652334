"""What was found of attention to the depth, as one page."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from midus_hf.analysis.depth.map import DepthMap
from midus_hf.analysis.depth.pictures import draw_heads, draw_map, draw_writers
from midus_hf.analysis.depth.reading import DepthReading, WriterReading
from midus_hf.analysis.depth.tables import layers_table, writers_table
from midus_hf.analysis.page import write_page

_HOW_TO_READ = (
    "Each head joins what it reads of the sequence with what it reads of slots of the depth; shares are what it multiplies values "
    "with, the gate included, the mean over tokens. They tell what is read, and not what comes of it: a slot whose value is short, "
    "or that the output projection leaves out, adds little."
)


def write_depth_page(
    path: Path,
    report: Mapping[str, Any],
    readings: Sequence[DepthReading],
    found: Sequence[WriterReading],
    of_head: DepthMap | None = None,
) -> None:
    """Write a page that needs no other file. Needs matplotlib.

    Args:
        path: The file.
        report: What was read by which model: `model`, and `text` with its `path`, `tokens` and `loss`.
        readings: From `depth_readings`.
        found: From `writers`.
        of_head: From `depth_map`. Default: none is drawn.
    """
    text = report["text"]
    read = f"{report['model']} read {text['path']} ({text['tokens']:,} tokens, loss {text['loss']:.4f})."
    pictures = {"Layers by layers": draw_writers(readings), "Heads by slots": draw_heads(readings)}
    if of_head is not None:
        pictures[f"Layer {of_head.layer}, head {of_head.head}: tokens by keys and slots"] = draw_map(of_head)
    tables = [layers_table(readings), writers_table(found)]
    write_page(
        path,
        "What heads read of the depth",
        [read, _HOW_TO_READ],
        [table for table in tables if table.rows],
        pictures,
    )

"""The usage of a bank's blocks by texts: a table, JSON, CSV, and a picture."""

import csv
import io
from collections.abc import Mapping
from typing import Any

import torch

from midus_hf.analysis.report import usage_curves
from midus_hf.analysis.slots.block_usage import BlockUsage
from midus_hf.analysis.table_of_words import TableOfWords

_MOST_SHOWN = 3
"""Blocks of a level that tables name."""
_COLUMNS = ["text", "memory", "level", "block", "tokens", "share"]


def blocks_table(found: Mapping[str, BlockUsage]) -> TableOfWords:
    """A row per text and level.

    Args:
        found: By text.
    """
    rows = []
    for text, usage in found.items():
        for place, of_level in usage.summary().items():
            (counts,) = usage.counts[place]
            rows.append(
                [
                    text,
                    str(place),
                    f"{len(counts):,}",
                    f"{int((counts == 0).sum()):,}",
                    f"{of_level.used:.1%}",
                    f"{of_level.perplexity:.1%}",
                    f"{of_level.largest:.2%}",
                    ", ".join(f"{block} ({share:.1%})" for block, share in _most_fetched(counts)),
                ]
            )
        if usage.generic_tokens:
            rows.append([text, "generic", "", "", "", "", "", f"{usage.generic_tokens:,} tokens"])
    head = ["text", "bank", "blocks", "never fetched", "used", "perplexity / N", "largest share", "most fetched"]
    return TableOfWords("Blocks fetched", head, rows)


def _most_fetched(counts: torch.Tensor) -> list[tuple[int, float]]:
    best = counts.sort(descending=True, stable=True)
    total = max(1, int(counts.sum()))
    pairs = zip(best.indices[:_MOST_SHOWN].tolist(), best.values[:_MOST_SHOWN].tolist(), strict=True)
    return [(block, tokens / total) for block, tokens in pairs if tokens]


def as_json(usage: BlockUsage) -> dict[str, Any]:
    """All numbers, for other programs, by memory and level; of blocks those that were fetched."""
    found: dict[str, Any] = {}
    for place, of_level in usage.summary().items():
        (counts,) = usage.counts[place]
        of_memory = found.setdefault(place.memory, {"generic_tokens": usage.generic_tokens, "levels": {}})
        of_memory["levels"][str(place.level)] = {
            **vars(of_level),
            "blocks": len(counts),
            "never_fetched": int((counts == 0).sum()),
            "tokens": {str(block): int(counts[block]) for block in counts.nonzero().flatten().tolist()},
        }
    return found


def as_csv(found: Mapping[str, BlockUsage]) -> str:
    """A line per text and block, those that were never fetched included."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for text, usage in found.items():
        for place, (counts,) in usage.counts.items():
            total = max(1, int(counts.sum()))
            for block, tokens in enumerate(counts.tolist()):
                writer.writerow([text, place.memory, place.level, block, tokens, tokens / total])
    return stream.getvalue()


def draw_blocks(found: Mapping[str, BlockUsage]) -> bytes:
    """A panel per level with a curve per text, as PNG: how often its blocks are fetched, most fetched first. Needs matplotlib."""
    import matplotlib.figure

    curves = {text: usage_curves(usage.counts) for text, usage in found.items()}
    places = list(next(iter(curves.values())))
    figure = matplotlib.figure.Figure(figsize=(1 + 3.6 * len(places), 3.4), layout="constrained")
    panels = figure.subplots(1, len(places), squeeze=False)[0]
    for axes, place in zip(panels, places, strict=True):
        for text, of_text in curves.items():
            curve = of_text[place]
            rank = (torch.arange(len(curve)) + 1) / len(curve)
            axes.plot(rank.tolist(), curve.tolist(), linewidth=1.5, label=text, marker="." if len(curve) < 40 else "")
        axes.axhline(1, color="#888888", linewidth=1, linestyle="--", label="all alike")
        axes.set_yscale("symlog", linthresh=0.1)
        axes.set_ylim(bottom=0)
        axes.set_xlim(0, 1.02)
        axes.xaxis.set_major_formatter("{x:.0%}")
        axes.set_title(f"{place}, {len(curve):,} blocks", fontsize=9)
        axes.set_xlabel("blocks, most fetched first", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("tokens, in multiples of the mean", fontsize=8)
    panels[-1].legend(frameon=False, fontsize="small")
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=120)
    return stream.getvalue()

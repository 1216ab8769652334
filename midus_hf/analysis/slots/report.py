"""The usage of slots, chapters and blocks for people to look at: tables, JSON, CSV and pictures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from midus_hf.analysis.pictures import as_png, draw_curves, new_figure
from midus_hf.analysis.slots.block_usage import BankLevel, BlockUsage
from midus_hf.analysis.slots.usage import MemoryUsage, Place
from midus_hf.analysis.table_of_words import TableOfWords, csv_text
from midus_hf.analysis.watched_models import MemoryPlace

_MOST_SHOWN = 3
"""Blocks of a level that tables name."""


def usage_table(memories: Mapping[MemoryPlace, MemoryUsage]) -> Table:
    """A row per memory.

    Args:
        memories: From `Usage.summary`.
    """
    table = Table(title="Slots retrieved")
    for name in ("layer", "used", "perplexity / N", "largest share"):
        table.add_column(name, justify="right")
    for place, usage in memories.items():
        table.add_row(str(place), f"{usage.used:.1%}", f"{usage.perplexity:.1%}", f"{usage.largest:.2%}")
    return table


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
    lines = [
        [text, place.memory, place.level, block, tokens, tokens / total]
        for text, usage in found.items()
        for place, (counts,) in usage.counts.items()
        for total in [max(1, int(counts.sum()))]
        for block, tokens in enumerate(counts.tolist())
    ]
    return csv_text(["text", "memory", "level", "block", "tokens", "share"], lines)


def usage_curves(counts: Mapping[Place, torch.Tensor]) -> dict[Place, torch.Tensor]:
    """How often the slots of each memory are retrieved, in multiples of the mean, most retrieved first.

    Args:
        counts: `[H, N]`, int64, by memory, or `[1, N]` by level of a bank.

    Returns:
        `[N]`, float64, by memory: sorted for each head, then the mean over heads, so 1 throughout where all slots are
        retrieved equally often; 0 throughout where none was.
    """
    curves = {}
    for place, of_memory in counts.items():
        wide = of_memory.double().cpu()
        mean = wide.mean(-1, keepdim=True).clamp(min=1 / wide.shape[-1])
        curves[place] = (wide / mean).sort(-1, descending=True).values.mean(0)
    return curves


def draw_usage(counts: Mapping[MemoryPlace | BankLevel, torch.Tensor], path: Path) -> None:
    """Draw a curve per memory, from dark for the first layer to light for the last, then one per level of a bank. Needs matplotlib.

    Args:
        counts: As in `usage_curves`.
        path: The file to write, of a kind in `midus_hf.analysis.pictures.PICTURE_SUFFIXES`.
    """
    from matplotlib import colormaps

    figure = new_figure(7.5, 4.2, layout=None)
    axes = figure.subplots()
    curves = {
        str(place) if isinstance(place, BankLevel) else f"layer {place}": curve
        for place, curve in usage_curves(counts).items()
    }
    shades = [0.9 * number / max(1, len(curves) - 1) for number in range(len(curves))]
    draw_curves(axes, curves, [{"color": colormaps["viridis"](shade)} for shade in shades])
    axes.set_xlim(0, 1)
    kinds = {isinstance(place, BankLevel) for place in counts}
    what = {frozenset({False}): "slots of a head", frozenset({True}): "blocks of a level"}
    read = what.get(frozenset(kinds), "slots, or blocks of a level")
    axes.set_xlabel(f"{read}, most {'fetched' if kinds == {True} else 'retrieved'} first")
    axes.set_ylabel(f"{'times' if True in kinds else 'retrievals'}, in multiples of the mean")
    axes.legend(frameon=False, fontsize="small", ncols=1 + len(curves) // 8)
    figure.tight_layout()
    figure.savefig(path)


def draw_blocks(found: Mapping[str, BlockUsage]) -> bytes:
    """A panel per level with a curve per text, as PNG: how often its blocks are fetched, most fetched first. Needs matplotlib."""
    curves = {text: usage_curves(usage.counts) for text, usage in found.items()}
    places = list(next(iter(curves.values())))
    figure = new_figure(1 + 3.6 * len(places), 3.4)
    panels = figure.subplots(1, len(places), squeeze=False)[0]
    for axes, place in zip(panels, places, strict=True):
        of_level = {text: of_text[place] for text, of_text in curves.items()}
        num_blocks = len(next(iter(of_level.values())))
        draw_curves(axes, of_level, [{"marker": "." if num_blocks < 40 else ""}] * len(of_level))
        axes.set_xlim(0, 1.02)
        axes.set_title(f"{place}, {num_blocks:,} blocks", fontsize=9)
        axes.set_xlabel("blocks, most fetched first", fontsize=8)
    panels[0].set_ylabel("tokens, in multiples of the mean", fontsize=8)
    panels[-1].legend(frameon=False, fontsize="small")
    return as_png(figure, tight=False)

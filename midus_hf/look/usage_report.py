"""Usage of slots, chapters and blocks as tables, JSON, CSV and pictures."""

from collections.abc import Mapping
from typing import Any

import torch

from midus_hf.look.block_usage import BankLevel, BlockUsage
from midus_hf.look.page import TableOfWords, csv_text
from midus_hf.look.pictures import draw_curves, new_figure
from midus_hf.look.usage import MemoryUsage, Place
from midus_hf.look.watched_models import MemoryPlace

# Number of blocks per level that tables name.
_MOST_SHOWN = 3


def usage_table(usages: Mapping[str, Mapping[MemoryPlace, MemoryUsage]]) -> TableOfWords:
    """Return a table with one row per text and memory, from the usage of each memory by the text's name."""
    rows = [
        [text, str(memory_place), f"{usage.used:.1%}", f"{usage.perplexity:.1%}", f"{usage.largest:.2%}"]
        for text, memories in usages.items()
        for memory_place, usage in memories.items()
    ]
    return TableOfWords("Slots retrieved", ["text", "layer", "used", "perplexity / N", "largest share"], rows)


def blocks_table(usages: Mapping[str, BlockUsage]) -> TableOfWords:
    """Return a table with one row per text and level, and one per text that fetched the generic memory."""
    rows = []
    for text, usage in usages.items():
        for bank_level, of_level in usage.summary().items():
            (counts,) = usage.counts[bank_level]
            rows.append(
                [
                    text,
                    str(bank_level),
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
    """Return all numbers for other programs, per memory and level. `tokens` lists only blocks that were fetched."""
    memories: dict[str, Any] = {}
    for bank_level, of_level in usage.summary().items():
        (counts,) = usage.counts[bank_level]
        of_memory = memories.setdefault(bank_level.memory, {"generic_tokens": usage.generic_tokens, "levels": {}})
        of_memory["levels"][str(bank_level.level)] = {
            **vars(of_level),
            "blocks": len(counts),
            "never_fetched": int((counts == 0).sum()),
            "tokens": {str(block): int(counts[block]) for block in counts.nonzero().flatten().tolist()},
        }
    return memories


def usage_csv(counts: Mapping[str, Mapping[MemoryPlace | BankLevel, torch.Tensor]]) -> str:
    """Return a CSV file with one line per text and slot, chapter or block, also for slots that were never used.

    `counts` are retrievals per memory or fetches per level, in the shapes of `usage_curves`, by the text's name.
    """
    lines = [
        [text, key, head, number, count, count / total]
        for text, of_text in counts.items()
        for key, of_memory in of_text.items()
        for head, of_head in enumerate(of_memory.cpu())
        for total in [max(1, int(of_head.sum()))]
        for number, count in enumerate(of_head.tolist())
    ]
    return csv_text(["text", "memory", "head", "number", "count", "share"], lines)


def usage_curves(counts: Mapping[Place, torch.Tensor]) -> dict[Place, torch.Tensor]:
    """Return how often the slots of each memory are retrieved, in multiples of the mean, most retrieved first.

    Args:
        counts: Retrievals `[H, N]`, int64, per memory, or fetches `[1, N]` per level of a bank.

    Returns:
        `[N]`, float64, per memory or level: the counts are sorted per head, then averaged over heads. All values are 1 if all
        slots are retrieved equally often, and 0 if no slot was retrieved.
    """
    curves = {}
    for key, of_memory in counts.items():
        wide = of_memory.double().cpu()
        mean = wide.mean(-1, keepdim=True).clamp(min=1 / wide.shape[-1])
        curves[key] = (wide / mean).sort(-1, descending=True).values.mean(0)
    return curves


def draw_usage(counts: Mapping[MemoryPlace, torch.Tensor]) -> Any:
    """Return a figure with one curve per memory of `counts`, coloured from dark (first) to light (last). Needs matplotlib."""
    from matplotlib import colormaps

    figure = new_figure(7.5, 4.2, layout=None)
    axes = figure.subplots()
    curves = {f"layer {memory_place}": curve for memory_place, curve in usage_curves(counts).items()}
    shades = [0.9 * number / max(1, len(curves) - 1) for number in range(len(curves))]
    draw_curves(axes, curves, [{"color": colormaps["viridis"](shade)} for shade in shades])
    axes.set_xlim(0, 1)
    axes.set_xlabel("slots of a head, most retrieved first")
    axes.set_ylabel("retrievals, in multiples of the mean")
    axes.legend(frameon=False, fontsize="small", ncols=1 + len(curves) // 8)
    return figure


def draw_blocks(usages: Mapping[str, BlockUsage]) -> Any:
    """Return a figure of how often blocks are fetched, most fetched first: a panel per level, a curve per text. Needs matplotlib."""
    curves = {text: usage_curves(usage.counts) for text, usage in usages.items()}
    levels = list(next(iter(curves.values())))
    figure = new_figure(1 + 3.6 * len(levels), 3.4)
    panels = figure.subplots(1, len(levels), squeeze=False)[0]
    for axes, bank_level in zip(panels, levels, strict=True):
        of_level = {text: of_text[bank_level] for text, of_text in curves.items()}
        num_blocks = len(next(iter(of_level.values())))
        draw_curves(axes, of_level, [{"marker": "." if num_blocks < 40 else ""}] * len(of_level))
        axes.set_xlim(0, 1.02)
        axes.set_title(f"{bank_level}, {num_blocks:,} blocks", fontsize=9)
        axes.set_xlabel("blocks, most fetched first", fontsize=8)
    panels[0].set_ylabel("tokens, in multiples of the mean", fontsize=8)
    panels[-1].legend(frameon=False, fontsize="small")
    return figure

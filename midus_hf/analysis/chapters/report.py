"""Results about chapters as CSV, and as pictures by their titles."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from midus_hf.analysis.chapters.ablation import Ablation
from midus_hf.analysis.chapters.pictures import draw_entropies, draw_shares, draw_specialisation
from midus_hf.analysis.chapters.stats import ChapterStats
from midus_hf.analysis.table_of_words import csv_text

HOW_TO_READ = (
    "Shares, entropies and overlaps of chapters show what routers do, and not what the reading changes: chapters may be read by all "
    "tokens of a text and add nothing to it. Attention to memory tokens has its own softmax, so mass shows how attention is "
    "shared among chapters. The norms of what chapters add show how much the memory counts beside self-attention."
)


def stats_csv(stats: Sequence[ChapterStats]) -> str:
    """Return a CSV file with a line per layer, memory, text and chapter."""
    rows = [
        [of_layer.layer, of_layer.memory, name, chapter, share, mass, lift]
        for of_layer in stats
        for name, text in of_layer.texts.items()
        for lifts in [of_layer.lifts.get(name, [None] * (of_layer.chapters - of_layer.shared_chapters))]
        for chapter, (share, mass, lift) in enumerate(
            zip(text.read_shares, text.attention_mass, [None] * of_layer.shared_chapters + lifts, strict=True)
        )
    ]
    return csv_text(["layer", "memory", "text", "chapter", "read_share", "attention_mass", "lift"], rows)


def stats_pictures(stats: Sequence[ChapterStats]) -> Mapping[str, Callable[[], Any]]:
    """Return functions that draw the statistics of each memory, by the titles of the figures."""
    drawers: dict[str, Callable[[], Any]] = {}
    for memory in dict.fromkeys(of_layer.memory for of_layer in stats):
        of_memory = [of_layer for of_layer in stats if of_layer.memory == memory]
        drawers[f"{memory}: entropies"] = partial(draw_entropies, of_memory)
        drawers[f"{memory}: shares"] = partial(draw_shares, of_memory)
        if of_memory[0].lifts:
            drawers[f"{memory}: specialisation"] = partial(draw_specialisation, of_memory)
    return drawers


def ablation_csv(ablation: Ablation) -> str:
    """Return a CSV file with a line per chapter and text."""
    rows = [
        [row.chapter, row.swapped_with, row.read_share, text, effect.difference, effect.standard_error]
        for row in ablation.chapters
        for text, effect in row.effects.items()
    ]
    return csv_text(["chapter", "swapped_with", "read_share", "text", "difference", "standard_error"], rows)

"""Results about chapters as files in a folder: a page, pictures, JSON and CSV."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from midus_hf.analysis.chapters.ablation import Ablation
from midus_hf.analysis.chapters.pictures import draw_ablation, draw_entropies, draw_shares, draw_specialisation
from midus_hf.analysis.chapters.stats import ChapterStats
from midus_hf.analysis.chapters.tables import ablation_table, reading_table, typical_table
from midus_hf.analysis.page import write_page
from midus_hf.analysis.table_of_words import csv_text

_HOW_TO_READ = (
    "Shares, entropies and overlaps tell what routers do, and not what comes of it: chapters may be read by all tokens of a text "
    "and add nothing to it. Attention to memory tokens is a softmax of its own, so mass says how it is shared among chapters; how "
    "much memory counts beside self-attention is told by the norms of what they add."
)


def write_stats(folder: Path, report: Mapping[str, Any], stats: Sequence[ChapterStats]) -> None:
    """Write `stats.json`, `stats.csv`, a PNG per picture and `report.html`. Needs matplotlib.

    Args:
        folder: Folder to write into. It is created if it does not exist.
        report: Content of `stats.json`.
        stats: Statistics, as `chapter_stats` returns them.
    """
    rows = [
        [of_layer.layer, of_layer.memory, name, chapter, share, mass, lift]
        for of_layer in stats
        for name, text in of_layer.texts.items()
        for lifts in [of_layer.lifts.get(name, [None] * (of_layer.chapters - of_layer.shared_chapters))]
        for chapter, (share, mass, lift) in enumerate(
            zip(text.read_shares, text.attention_mass, [None] * of_layer.shared_chapters + lifts, strict=True)
        )
    ]
    head = ["layer", "memory", "text", "chapter", "read_share", "attention_mass", "lift"]
    pictures = {}
    for memory in dict.fromkeys(of_layer.memory for of_layer in stats):
        of_memory = [of_layer for of_layer in stats if of_layer.memory == memory]
        pictures[f"{memory}: entropies"] = draw_entropies(of_memory)
        pictures[f"{memory}: shares"] = draw_shares(of_memory)
        if of_memory[0].lifts:
            pictures[f"{memory}: specialisation"] = draw_specialisation(of_memory)
    tables = [table for table in (reading_table(stats), typical_table(stats)) if table.rows]
    _write_folder(folder, "stats", report, csv_text(head, rows), pictures)
    paragraphs = [_texts(report["model"], report["texts"]), _HOW_TO_READ]
    write_page(folder / "report.html", "What chapters are read", paragraphs, tables, pictures)


def write_ablation(folder: Path, report: Mapping[str, Any], ablation: Ablation) -> None:
    """Write `ablation.json`, `ablation.csv`, `ablation.png` and `report.html`. Needs matplotlib.

    Args:
        folder: Folder to write into. It is created if it does not exist.
        report: Content of `ablation.json`.
        ablation: Result, as `ablate` returns it.
    """
    rows = [
        [row.chapter, row.swapped_with, row.read_share, text, effect.difference, effect.standard_error]
        for row in ablation.chapters
        for text, effect in row.effects.items()
    ]
    head = ["chapter", "swapped_with", "read_share", "text", "difference", "standard_error"]
    pictures = {"ablation": draw_ablation(ablation)}
    _write_folder(folder, "ablation", report, csv_text(head, rows), pictures)
    paragraphs = [_texts(report["model"], report["texts"])]
    title = "What texts lose without a chapter"
    write_page(folder / "report.html", title, paragraphs, [ablation_table(ablation)], pictures)


def _texts(model: str, texts: Mapping[str, Mapping[str, Any]]) -> str:
    listed = ", ".join(f"{name} ({text['tokens']:,} tokens, loss {text['loss']:.4f})" for name, text in texts.items())
    return f"{model} read {listed}."


def _write_folder(
    folder: Path, name: str, report: Mapping[str, Any], table: str, pictures: Mapping[str, bytes]
) -> None:
    """Write `{name}.json`, `{name}.csv` and the pictures, which are named after what they show."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    (folder / f"{name}.csv").write_text(table, encoding="utf-8", newline="\r\n")
    for shows, picture in pictures.items():
        (folder / f"{shows.replace(': ', '-')}.png").write_bytes(picture)

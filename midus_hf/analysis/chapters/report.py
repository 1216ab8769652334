"""What was found of chapters, as files in a folder: a page, pictures, JSON and CSV."""

import csv
import importlib.util
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from midus_hf.analysis.chapters.ablation import Ablation
from midus_hf.analysis.chapters.pictures import draw_ablation, draw_entropies, draw_shares, draw_specialisation
from midus_hf.analysis.chapters.stats import ChapterStats
from midus_hf.analysis.chapters.tables import ablation_table, reading_table, typical_table
from midus_hf.analysis.page import write_page

_HOW_TO_READ = (
    "Shares, entropies and overlaps tell what routers do, and not what comes of it: chapters may be read by all tokens of a text "
    "and add nothing to it. Attention to memory tokens is a softmax of its own, so mass says how it is shared among chapters; how "
    "much memory counts beside self-attention is told by the norms of what they add."
)


def check_output(folder: Path) -> None:
    """See that a folder of pictures can be written.

    Args:
        folder: Absent or empty.

    Raises:
        ValueError: If it is not, or matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "output is a folder of pictures, which need matplotlib; install it with pip install 'midus-hf[report]'."
        )
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"output is {str(folder)!r}, which exists and is no empty folder; name another.")


def write_stats(folder: Path, report: Mapping[str, Any], stats: Sequence[ChapterStats]) -> None:
    """Write `stats.json`, `stats.csv`, a PNG per picture and `report.html`. Needs matplotlib.

    Args:
        folder: Made if it is not there.
        report: What `stats.json` holds.
        stats: From `chapter_stats`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "stats.json", report)
    head = ["layer", "memory", "text", "chapter", "read_share", "attention_mass", "lift"]
    rows = [
        [of_layer.layer, of_layer.memory, name, chapter, share, mass, lift]
        for of_layer in stats
        for name, text in of_layer.texts.items()
        for lifts in [of_layer.lifts.get(name, [None] * (of_layer.chapters - of_layer.shared_chapters))]
        for chapter, (share, mass, lift) in enumerate(
            zip(text.read_shares, text.attention_mass, [None] * of_layer.shared_chapters + lifts, strict=True)
        )
    ]
    _write_csv(folder / "stats.csv", head, rows)
    pictures = {}
    for memory in dict.fromkeys(of_layer.memory for of_layer in stats):
        of_memory = [of_layer for of_layer in stats if of_layer.memory == memory]
        pictures[f"{memory}: entropies"] = draw_entropies(of_memory)
        pictures[f"{memory}: shares"] = draw_shares(of_memory)
        if of_memory[0].lifts:
            pictures[f"{memory}: specialisation"] = draw_specialisation(of_memory)
    tables = [reading_table(stats), typical_table(stats)]
    _write_pictures(folder, pictures)
    write_page(
        folder / "report.html",
        "What chapters are read",
        [_texts(report["model"], report["texts"]), _HOW_TO_READ],
        [table for table in tables if table.rows],
        pictures,
    )


def write_ablation(folder: Path, report: Mapping[str, Any], ablation: Ablation) -> None:
    """Write `ablation.json`, `ablation.csv`, `ablation.png` and `report.html`. Needs matplotlib.

    Args:
        folder: Made if it is not there.
        report: What `ablation.json` holds.
        ablation: From `ablate`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "ablation.json", report)
    head = ["chapter", "swapped_with", "read_share", "text", "difference", "standard_error"]
    rows = [
        [row.chapter, row.swapped_with, row.read_share, text, effect.difference, effect.standard_error]
        for row in ablation.chapters
        for text, effect in row.effects.items()
    ]
    _write_csv(folder / "ablation.csv", head, rows)
    pictures = {"ablation": draw_ablation(ablation)}
    _write_pictures(folder, pictures)
    write_page(
        folder / "report.html",
        "What texts lose without a chapter",
        [_texts(report["model"], report["texts"])],
        [ablation_table(ablation)],
        pictures,
    )


def _texts(model: str, texts: Mapping[str, Mapping[str, Any]]) -> str:
    listed = ", ".join(f"{name} ({text['tokens']:,} tokens, loss {text['loss']:.4f})" for name, text in texts.items())
    return f"{model} read {listed}."


def _write_json(path: Path, report: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _write_csv(path: Path, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        writer.writerows(rows)


def _write_pictures(folder: Path, pictures: Mapping[str, bytes]) -> None:
    for words, picture in pictures.items():
        (folder / f"{words.replace(': ', '-')}.png").write_bytes(picture)

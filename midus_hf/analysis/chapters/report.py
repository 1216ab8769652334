"""Results about chapters as tables, CSV and pictures. Functions that draw return matplotlib figures, and need matplotlib."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from midus_hf.analysis.chapters.ablation import Ablation
from midus_hf.analysis.chapters.stats import ChapterStats
from midus_hf.analysis.chapters.tokens import NearChapter
from midus_hf.analysis.inside.vocabulary_head import in_words
from midus_hf.analysis.page import TableOfWords, csv_text
from midus_hf.analysis.pictures import HEAT, label_some, new_figure

HOW_TO_READ = (
    "Shares, entropies and overlaps of chapters show what routers do, and not what the reading changes: chapters may be read by all "
    "tokens of a text and add nothing to it. Attention to memory tokens has its own softmax, so mass shows how attention is "
    "shared among chapters. The norms of what chapters add show how much the memory counts beside self-attention."
)


def reading_table(stats: Sequence[ChapterStats]) -> TableOfWords:
    """Return a table of how chapters are read over all texts, one row per memory and layer."""
    head = ["layer", "entropy", "effective", "dead", "within", "between", "shared", "/ attn", "/ resid", "info"]
    rows = [
        [
            _where(of_layer, stats),
            _figure(of_layer.overall.entropy),
            f"{of_layer.overall.effective_chapters:.1f}",
            str(len(of_layer.overall.dead_chapters)),
            _figure(of_layer.overall.stability_within),
            _figure(of_layer.overall.stability_between),
            f"{of_layer.overall.shared_mass:.3f}",
            f"{of_layer.overall.added_to_attention:.3g}",
            f"{of_layer.overall.added_to_residual:.3g}",
            _figure(of_layer.mutual_information),
        ]
        for of_layer in stats
    ]
    first = stats[0]
    title = f"{first.k} of {first.chapters - first.shared_chapters} routed chapters; entropy at most {first.greatest_entropy:.3f}"
    if first.greatest_information is not None:
        title += f", information {first.greatest_information:.3f} nats"
    return TableOfWords(title, head, rows)


def typical_table(stats: Sequence[ChapterStats], most_layers: int | None = None) -> TableOfWords:
    """Return a table of the chapters most typical of each text, for the `most_layers` layers with the most information."""
    ordered = sorted(stats, key=lambda of_layer: -(of_layer.mutual_information or 0))[:most_layers]
    rows = [
        [
            _where(of_layer, stats),
            text,
            ", ".join(f"{row.chapter} (x {row.lift:.2f}, {row.read_share:.1%})" for row in typical),
        ]
        for of_layer in ordered
        for text, typical in of_layer.typical.items()
    ]
    return TableOfWords("Chapters typical of a text (lift, share of its tokens)", ["layer", "text", "chapters"], rows)


def stats_csv(stats: Sequence[ChapterStats]) -> str:
    """Return a CSV file with a line per layer, memory, text and chapter."""
    rows = []
    for of_layer in stats:
        shared: list[float | None] = [None] * of_layer.shared_chapters
        unknown = [None] * (of_layer.chapters - of_layer.shared_chapters)
        for name, text in of_layer.texts.items():
            columns = (text.read_shares, text.attention_mass, [*shared, *of_layer.lifts.get(name, unknown)])
            for chapter, cells in enumerate(zip(*columns, strict=True)):
                rows.append([of_layer.layer, of_layer.memory, name, chapter, *cells])
    return csv_text(["layer", "memory", "text", "chapter", "read_share", "attention_mass", "lift"], rows)


def stats_pictures(stats: Sequence[ChapterStats]) -> dict[str, Callable[[], Any]]:
    """Return functions that draw the statistics of each memory, by the titles of the figures."""
    drawers: dict[str, Callable[[], Any]] = {}
    for memory in dict.fromkeys(of_layer.memory for of_layer in stats):
        of_memory = [of_layer for of_layer in stats if of_layer.memory == memory]
        drawers[f"{memory}: entropies"] = partial(_draw_entropies, of_memory)
        drawers[f"{memory}: shares"] = partial(_draw_shares, of_memory)
        if of_memory[0].lifts:
            drawers[f"{memory}: specialisation"] = partial(_draw_specialisation, of_memory)
    return drawers


def _draw_shares(stats: Sequence[ChapterStats]) -> Any:
    """Return a figure of the share of each text's tokens that read each routed chapter: a panel per text, a row per layer."""
    maps = {
        f"{text}: share of tokens that read a chapter": [
            of_layer.texts[text].read_shares[of_layer.shared_chapters :] for of_layer in stats
        ]
        for text in stats[0].texts
    }
    most = max(max(map(max, of_text)) for of_text in maps.values())
    return _panels(maps, stats, {"cmap": "viridis", "vmin": 0, "vmax": most or 1})


def _draw_specialisation(stats: Sequence[ChapterStats]) -> Any:
    """Return a figure of log2 of each routed chapter's lift (`ChapterStats.lifts`): a panel per text, a row per layer."""
    most = max(1.0, math.log2(len(stats[0].lifts)))
    maps = {
        f"{text}: log2 of the lift of a chapter": [
            [math.nan if lift is None else math.log2(max(lift, 2**-most)) for lift in of_layer.lifts[text]]
            for of_layer in stats
        ]  # NaN stays blank in the picture
        for text in stats[0].lifts
    }
    return _panels(maps, stats, {"cmap": "RdBu_r", "vmin": -most, "vmax": most})


def _draw_entropies(stats: Sequence[ChapterStats]) -> Any:
    """Return a figure of the entropy of each layer's router on each text, with a line at the greatest possible entropy."""
    texts = list(stats[0].texts)
    figure = new_figure(max(6.0, 0.35 * len(stats) * len(texts)), 3.6, layout=None)
    axes = figure.subplots()
    width = 0.8 / len(texts)
    for number, text in enumerate(texts):
        places = [layer - 0.4 + width * (number + 0.5) for layer in range(len(stats))]
        axes.bar(places, [of_layer.texts[text].entropy or 0.0 for of_layer in stats], width, label=text)
    axes.axhline(stats[0].greatest_entropy, color="#888888", linewidth=1, linestyle="--", label="all alike")
    axes.set_xticks(range(len(stats)), [str(of_layer.layer) for of_layer in stats])
    axes.set_xlabel("layer")
    axes.set_ylabel("entropy of the router (nats)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small", ncols=1 + len(texts), loc="lower left", bbox_to_anchor=(0, 1))
    return figure


def _panels(maps: dict[str, list[list[float]]], stats: Sequence[ChapterStats], colours: dict[str, Any]) -> Any:
    """Return a figure of heat maps `[layers, C - S]`, by title, one below another with the same colour scale."""
    shared, layers = stats[0].shared_chapters, len(stats)
    figure = new_figure(9, len(maps) * (1.1 + 0.16 * layers) + 0.4)
    panels = figure.subplots(len(maps), squeeze=False)[:, 0]
    image: Any = None
    for axes, (title, rows) in zip(panels, maps.items(), strict=True):
        extent = (shared - 0.5, shared + len(rows[0]) - 0.5, layers - 0.5, -0.5)
        image = axes.imshow(rows, extent=extent, **colours, **HEAT)
        axes.set_title(title, fontsize="medium", loc="left")
        label_some(axes.set_yticks, [_where(of_layer, stats) for of_layer in stats])
        axes.set_ylabel("layer")
    panels[-1].set_xlabel("chapter")
    figure.colorbar(image, ax=list(panels))
    return figure


def ablation_table(ablation: Ablation) -> TableOfWords:
    """Return a table of each text's change in loss without each chapter, in descending order of the greatest change."""
    texts = list(ablation.losses)
    ordered = sorted(ablation.chapters, key=lambda row: -max(effect.difference for effect in row.effects.values()))
    rows = [["as it is", "", *(f"{ablation.losses[text]:.5f}" for text in texts)]]
    for row in ordered:
        name = str(row.chapter) if row.swapped_with is None else f"{row.chapter} as {row.swapped_with}"
        rows.append([name, f"{row.read_share:.1%}", *(row.effects[text].words for text in texts)])
    title = f"Loss without a chapter, less loss as it is ({ablation.mode}; nats per token)"
    return TableOfWords(title, ["chapter", "read by", *texts], rows)


def ablation_csv(ablation: Ablation) -> str:
    """Return a CSV file with a line per chapter and text."""
    rows = [
        [row.chapter, row.swapped_with, row.read_share, text, effect.difference, effect.standard_error]
        for row in ablation.chapters
        for text, effect in row.effects.items()
    ]
    return csv_text(["chapter", "swapped_with", "read_share", "text", "difference", "standard_error"], rows)


def draw_ablation(ablation: Ablation) -> Any:
    """Return a figure of how much each text's loss grows without each chapter, in 1/1000 nat per token: a row per text."""
    texts = list(ablation.losses)
    effects = [[1000 * row.effects[text].difference for row in ablation.chapters] for text in texts]
    most = max(max(map(abs, of_text)) for of_text in effects) or 1.0
    width = min(24.0, max(6.0, 2.5 + 0.3 * len(ablation.chapters)))
    figure = new_figure(width, 1.4 + 0.4 * len(texts), layout=None)
    axes = figure.subplots()
    image = axes.imshow(effects, cmap="RdBu_r", vmin=-most, vmax=most, **HEAT)
    label_some(axes.set_xticks, [str(row.chapter) for row in ablation.chapters], 64)
    axes.set_yticks(range(len(texts)), texts)
    axes.set_xlabel("chapter")
    figure.colorbar(image, ax=axes, label="loss gained\n(1/1000 nat per token)")
    return figure


def nearest_table(near: Sequence[NearChapter]) -> TableOfWords:
    """Return a table of the tokens nearest to each chapter."""
    rows = []
    for of_chapter in near:
        name, layer = str(of_chapter.chapter), str(of_chapter.layer)
        rows.append([layer, name, f"{of_chapter.norm:.3g}", in_words(of_chapter.tokens) or "adds nothing"])
        rows += [[layer, f"{name}.{number}", "", in_words(of_row)] for number, of_row in enumerate(of_chapter.rows)]
    head = ["layer", "chapter", "norm", "tokens"]
    return TableOfWords("Tokens nearest to memory tokens (a probe, no proof)", head, rows)


def _where(of_layer: ChapterStats, stats: Sequence[ChapterStats]) -> str:
    """Return the label of a layer: its index, and the name of its memory if `stats` covers several memories."""
    several = len({other.memory for other in stats}) > 1
    return f"{of_layer.layer} {of_layer.memory}" if several else str(of_layer.layer)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"

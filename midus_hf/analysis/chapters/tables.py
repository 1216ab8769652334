"""Results about chapters as tables of words, for a terminal and for a page."""

from collections.abc import Sequence

from midus_hf.analysis.chapters.ablation import Ablation
from midus_hf.analysis.chapters.stats import ChapterStats
from midus_hf.analysis.chapters.tokens import NearChapter
from midus_hf.analysis.inside.vocabulary_head import in_words
from midus_hf.analysis.table_of_words import TableOfWords


def reading_table(stats: Sequence[ChapterStats]) -> TableOfWords:
    """Return a table of how chapters are read over all texts, one row per memory and layer."""
    head = ["layer", "entropy", "effective", "dead", "within", "between", "shared", "/ attn", "/ resid", "info"]
    rows = [
        [
            where(of_layer, stats),
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
            where(of_layer, stats),
            text,
            ", ".join(f"{row.chapter} (x {row.lift:.2f}, {row.read_share:.1%})" for row in typical),
        ]
        for of_layer in ordered
        for text, typical in of_layer.typical.items()
    ]
    return TableOfWords("Chapters typical of a text (lift, share of its tokens)", ["layer", "text", "chapters"], rows)


def ablation_table(ablation: Ablation) -> TableOfWords:
    """Return a table of each text's change in loss without each chapter, in descending order of the greatest change."""
    texts = list(ablation.losses)
    ordered = sorted(ablation.chapters, key=lambda row: -max(effect.difference for effect in row.effects.values()))
    rows = [["as it is", "", *(f"{ablation.losses[text]:.5f}" for text in texts)]]
    for row in ordered:
        name = str(row.chapter) if row.swapped_with is None else f"{row.chapter} as {row.swapped_with}"
        effects = [row.effects[text] for text in texts]
        rows.append([name, f"{row.read_share:.1%}", *(effect.words for effect in effects)])
    title = f"Loss without a chapter, less loss as it is ({ablation.mode}; nats per token)"
    return TableOfWords(title, ["chapter", "read by", *texts], rows)


def nearest_table(near: Sequence[NearChapter]) -> TableOfWords:
    """Return a table of the tokens nearest to each chapter."""
    rows = []
    for of_chapter in near:
        name, layer = str(of_chapter.chapter), str(of_chapter.layer)
        rows.append([layer, name, f"{of_chapter.norm:.3g}", in_words(of_chapter.tokens) or "adds nothing"])
        rows += [[layer, f"{name}.{number}", "", in_words(of_row)] for number, of_row in enumerate(of_chapter.rows)]
    return TableOfWords(
        "Tokens nearest to memory tokens (a probe, no proof)", ["layer", "chapter", "norm", "tokens"], rows
    )


def where(of_layer: ChapterStats, stats: Sequence[ChapterStats]) -> str:
    """Return the label of a layer: its index, and the name of its memory if `stats` covers several memories."""
    several = len({other.memory for other in stats}) > 1
    return f"{of_layer.layer} {of_layer.memory}" if several else str(of_layer.layer)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"

"""The report on stages: what each variant gains over the base after each stage, in tables and a picture."""

import statistics
from collections.abc import Sequence
from typing import Any

from midus_hf.compare.findings import Findings, VariantFindings, with_spread
from midus_hf.compare.learning import Spread, spread
from midus_hf.compare.results import Result
from midus_hf.look.page import TableOfWords
from midus_hf.look.pictures import as_png, new_figure

HOW_TO_READ = (
    "All losses are nats per token over documents that are measured one by one, in windows that end where documents end. Each "
    "number of a table of stages says how far a model lies below the base, the mean over seeds; texts outside the stages are "
    "retention. Learned is the mean over all stages at the end. Backward transfer is the mean over all stages but the last of the "
    "loss right after the stage minus the loss at the end: below 0, later stages cost what was learned. A variant with one model per "
    "stage measures each document by the model of the nearest stage, or by the base where no stage is near; its trained parameters "
    "are those of one stage. Adapters are merged after each stage, and the next stage trains new ones."
)


def gains(findings: Findings, variant: VariantFindings) -> list[list[float]]:
    """Return how far the loss of each text lies below the base after each stage, the mean over seeds, in nats per token.

    Rows are stages, columns the texts of stages and then of retention.
    """
    base, texts = findings.base.losses, stage_texts(findings)
    num_stages = len(findings.comparison.stages)
    return [
        [base[text] - statistics.fmean(one.curve[stage + 1].losses[text] for one in variant.results) for text in texts]
        for stage in range(num_stages)
    ]


def stage_texts(findings: Findings) -> list[str]:
    """Return the names of the texts that are measured after each stage."""
    return [*findings.comparison.domain, *findings.comparison.retention]


def backward_transfer(results: Sequence[Result], stages: Sequence[str]) -> Spread:
    """Return, over seeds, the mean of the losses of earlier stages right after the stage minus those at the end."""
    return spread(
        [
            statistics.fmean(
                one.curve[number + 1].losses[stage] - one.losses[stage] for number, stage in enumerate(stages[:-1])
            )
            for one in results
        ]
    )


def stage_tables(findings: Findings) -> list[TableOfWords]:
    """Return a table of what was kept over the stages, and a table of gains for each variant."""
    stages = list(findings.comparison.stages)
    rows = [
        [
            variant.name,
            with_spread(variant.learned, "{:+.4f}"),
            with_spread(backward_transfer(variant.results, stages), "{:+.4f}"),
            with_spread(variant.forgotten, "{:+.4f}"),
            _share_routed(variant.results),
        ]
        for variant in findings.variants
    ]
    head = ["variant", "learned", "backward transfer", "forgotten", "documents at their stage"]
    tables = [TableOfWords("At the end of all stages", head, rows)]
    for variant in findings.variants:
        cells = [
            [f"after {stage}", *(f"{gain:+.4f}" for gain in row)]
            for stage, row in zip(stages, gains(findings, variant), strict=True)
        ]
        tables.append(TableOfWords(f"{variant.name}: nats below the base", ["", *stage_texts(findings)], cells))
    return tables


def stages_as_json(findings: Findings) -> dict[str, Any]:
    """Return what was gained and kept over the stages, by variant, for other programs."""
    stages = list(findings.comparison.stages)
    return {
        variant.name: {
            "texts": stage_texts(findings),
            "gains": gains(findings, variant),
            "backward_transfer": backward_transfer(variant.results, stages).mean,
            "routed": [dict(one.routed) for one in variant.results],
        }
        for variant in findings.variants
    }


def draw_stages(findings: Findings) -> bytes:
    """Draw the gains of each variant as a map of colours, and return PNG. The picture needs matplotlib."""
    texts, stages = stage_texts(findings), list(findings.comparison.stages)
    all_gains = [gains(findings, variant) for variant in findings.variants]
    largest = max(abs(gain) for rows in all_gains for row in rows for gain in row) or 1.0
    figure = new_figure(1.2 * len(texts) + 3.0, (0.5 * len(stages) + 1.4) * len(all_gains))
    panels = figure.subplots(len(all_gains), squeeze=False)[:, 0]
    for axes, variant, rows in zip(panels, findings.variants, all_gains, strict=True):
        axes.imshow(rows, cmap="RdBu", vmin=-largest, vmax=largest, aspect="auto")
        axes.set_title(f"{variant.name}: nats below the base", fontsize=9)
        axes.set_xticks(range(len(texts)), texts, fontsize=8)
        axes.set_yticks(range(len(stages)), [f"after {stage}" for stage in stages], fontsize=8)
        for row, numbers in enumerate(rows):
            for column, gain in enumerate(numbers):
                is_dark = abs(gain) > 0.6 * largest
                axes.text(
                    column, row, f"{gain:+.3f}", ha="center", va="center", fontsize=7, color="w" if is_dark else "k"
                )
    return as_png(figure)


def _share_routed(results: Sequence[Result]) -> str:
    """Return the per cent of the stages' documents that their stage's model measured; empty where stages have no models."""
    shares = [statistics.fmean(one.routed.values()) for one in results if one.routed]
    return with_spread(spread([100 * share for share in shares]), "{:.0f} %") if shares else ""

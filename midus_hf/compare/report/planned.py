"""The plan of a comparison: which runs there are, and how many of them are done."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from midus_hf.analysis.page import TableOfWords
from midus_hf.compare.options import Comparison
from midus_hf.compare.rates import rate_name
from midus_hf.compare.report.words import short_count
from midus_hf.compare.results import read_result
from midus_hf.compare.runs import runs_of
from midus_hf.compare.variants import Variant
from midus_hf.compare.workplace import Workplace


def planned(comparison: Comparison, variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """Return a record per variant with its size, its number of runs and how many of them are done, for other programs.

    Runs of null controls are not counted: they are added once their variant has ended.

    Args:
        comparison: Comparison that `plan` returned.
        variants: Variants that `plan` returned.
    """
    workplace = Workplace(Path(comparison.output_dir))
    rows = []
    for variant in variants:
        runs = runs_of(variant, comparison)
        rows.append(
            {
                "variant": variant.name,
                "method": None if variant.upscale is None else variant.upscale["method"],
                "fitted": variant.fitted,
                "new_parameters": variant.new_parameters,
                "trained_parameters": variant.trained_parameters,
                "rates": [rate_name(rate) for rate in variant.rates],
                "runs": len(runs),
                "done": sum(read_result(workplace.run_folder(run)) is not None for run in runs),
            }
        )
    return rows


def plan_table(comparison: Comparison, variants: Sequence[Variant]) -> TableOfWords:
    """Return the plan as a table with a row per variant, with the deviation of trained parameters from the budget in per cent.

    Args:
        comparison: Comparison that `plan` returned.
        variants: Variants that `plan` returned.
    """
    rows = []
    for variant in planned(comparison, variants):
        trains = (
            "as training says" if variant["trained_parameters"] is None else short_count(variant["trained_parameters"])
        )
        if comparison.trained_parameters is not None and variant["trained_parameters"] is not None:
            trains += f" ({variant['trained_parameters'] / comparison.trained_parameters - 1:+.1%})"
        cells = [
            variant["variant"],
            variant["method"] or "the base",
            variant["fitted"] or "",
            short_count(variant["new_parameters"]),
            trains,
        ]
        rows.append([*cells, ", ".join(variant["rates"]), f"{variant['done']} of {variant['runs']}"])
    seeds = ", ".join(map(str, comparison.seeds))
    return TableOfWords(
        f"Seeds {seeds}; null controls are added as variants end",
        ["variant", "method", "fitted", "new", "trains", "rates", "runs done"],
        rows,
    )

"""The plan of a comparison: which runs there are, and how many of them are done."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from midus_hf.analysis.table_of_words import TableOfWords
from midus_hf.compare.arms import Arm
from midus_hf.compare.cells import cells_of
from midus_hf.compare.options import Comparison
from midus_hf.compare.rates import rate_name
from midus_hf.compare.report.words import short_count
from midus_hf.compare.results import read_result
from midus_hf.compare.workplace import Workplace


def planned(comparison: Comparison, arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """Return a record per variant with its size, its number of runs and how many of them are done, for other programs.

    Runs of null controls are not counted: they are added once their variant has ended.

    Args:
        comparison: Comparison that `plan` returned.
        arms: Variants that `plan` returned.
    """
    workplace = Workplace(Path(comparison.output_dir))
    rows = []
    for arm in arms:
        cells = cells_of(arm, comparison)
        rows.append(
            {
                "arm": arm.name,
                "method": None if arm.upscale is None else arm.upscale["method"],
                "fitted": arm.fitted,
                "new_parameters": arm.new_parameters,
                "trained_parameters": arm.trained_parameters,
                "rates": [rate_name(rate) for rate in arm.rates],
                "runs": len(cells),
                "done": sum(read_result(workplace.cell(cell)) is not None for cell in cells),
            }
        )
    return rows


def plan_table(comparison: Comparison, arms: Sequence[Arm]) -> TableOfWords:
    """Return the plan as a table with a row per variant; trained parameters have their deviation from the budget in per cent.

    Args:
        comparison: Comparison that `plan` returned.
        arms: Variants that `plan` returned.
    """
    rows = []
    for arm in planned(comparison, arms):
        trains = "as training says" if arm["trained_parameters"] is None else short_count(arm["trained_parameters"])
        if comparison.trained_parameters is not None and arm["trained_parameters"] is not None:
            trains += f" ({arm['trained_parameters'] / comparison.trained_parameters - 1:+.1%})"
        cells = [
            arm["arm"],
            arm["method"] or "the base",
            arm["fitted"] or "",
            short_count(arm["new_parameters"]),
            trains,
        ]
        rows.append([*cells, ", ".join(arm["rates"]), f"{arm['done']} of {arm['runs']}"])
    seeds = ", ".join(map(str, comparison.seeds))
    return TableOfWords(
        f"Seeds {seeds}; null controls are added as arms end",
        ["arm", "method", "fitted", "new", "trains", "rates", "runs done"],
        rows,
    )

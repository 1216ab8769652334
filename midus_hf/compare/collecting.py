"""Results of a comparison, read from its folder."""

from collections.abc import Sequence
from pathlib import Path

from midus_hf.compare.arms import Arm
from midus_hf.compare.cells import Cell, cells_of
from midus_hf.compare.learning import best_rate
from midus_hf.compare.nulls import control_arms
from midus_hf.compare.options import Comparison
from midus_hf.compare.results import Result, read_result
from midus_hf.compare.workplace import BASE, Workplace


def control_cells(arm: Arm, results: Sequence[Result], comparison: Comparison) -> list[Cell]:
    """Return the runs of a variant's null controls, at the variant's best rate.

    Args:
        arm: A variant of the comparison.
        results: Results of the variant's runs; if empty, there are no null controls yet.
        comparison: Comparison that `plan` returned.
    """
    if not (results and arm.controls and arm.upscale is not None):
        return []
    rate = best_rate(results, list(comparison.domain))
    controls = control_arms(arm, results[0].controls, rate)
    return [cell for control in controls for cell in cells_of(control, comparison)]


def results_of(cells: Sequence[Cell], workplace: Workplace) -> list[Result]:
    """Return the results of the runs that are done, in the order of the runs.

    Args:
        cells: Runs of a comparison.
        workplace: Folder of the comparison.
    """
    return [result for cell in cells if (result := read_result(workplace.cell(cell))) is not None]


def collect(comparison: Comparison, arms: Sequence[Arm]) -> tuple[Result | None, list[Result], int]:
    """Return all results that a comparison has so far.

    Args:
        comparison: Comparison that `plan` returned.
        arms: Variants that `plan` returned.

    Returns:
        The result of the base, None if there is none yet; the results of all runs that are done, null controls included; and
        the number of runs that are not done.
    """
    workplace = Workplace(Path(comparison.output_dir))
    results: list[Result] = []
    missing = 0
    for arm in arms:
        cells = cells_of(arm, comparison)
        own = results_of(cells, workplace)
        controls = control_cells(arm, own, comparison)
        of_controls = results_of(controls, workplace)
        results += [*own, *of_controls]
        missing += len(cells) + len(controls) - len(own) - len(of_controls)
    return read_result(workplace.root / BASE), results, missing

"""Read what is done of a comparison."""

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
    """The cells of an arm's null controls, at the rate that was its best.

    Args:
        arm: Of the comparison.
        results: Of its cells; without one there are no controls yet.
        comparison: From `plan`.
    """
    if not (results and arm.controls and arm.upscale is not None):
        return []
    rate = best_rate(results, list(comparison.domain))
    controls = control_arms(arm, results[0].controls, rate)
    return [cell for control in controls for cell in cells_of(control, comparison)]


def results_of(cells: Sequence[Cell], place: Workplace) -> list[Result]:
    """The results of those cells that are done.

    Args:
        cells: Of a comparison.
        place: Its folder.
    """
    return [found for cell in cells if (found := read_result(place.cell(cell))) is not None]


def collect(comparison: Comparison, arms: Sequence[Arm]) -> tuple[Result | None, list[Result], int]:
    """What was measured of the base, the results of all cells that are done, controls included, and how many are not.

    Args:
        comparison: From `plan`.
        arms: From `plan`.
    """
    place = Workplace(Path(comparison.output_dir))
    results: list[Result] = []
    missing = 0
    for arm in arms:
        cells = cells_of(arm, comparison)
        own = results_of(cells, place)
        controls = control_cells(arm, own, comparison)
        of_controls = results_of(controls, place)
        results += [*own, *of_controls]
        missing += len(cells) + len(controls) - len(own) - len(of_controls)
    return read_result(place.root / BASE), results, missing

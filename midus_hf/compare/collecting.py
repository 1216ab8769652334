"""Results of a comparison, read from its folder."""

from collections.abc import Sequence
from pathlib import Path

from midus_hf.compare.learning import best_rate
from midus_hf.compare.null_controls import control_variants
from midus_hf.compare.options import Comparison
from midus_hf.compare.results import Result, read_result
from midus_hf.compare.runs import Run, runs_of
from midus_hf.compare.variants import Variant
from midus_hf.compare.workplace import BASE, Workplace


def control_runs(variant: Variant, results: Sequence[Result], comparison: Comparison) -> list[Run]:
    """Return the runs of a variant's null controls, at the variant's best rate.

    Args:
        variant: A variant of the comparison.
        results: Results of the variant's runs; if empty, there are no null controls yet.
        comparison: Comparison that `plan` returned.
    """
    if not (results and variant.controls and variant.upscale is not None):
        return []
    rate = best_rate(results, list(comparison.domain))
    controls = control_variants(variant, results[0].controls, rate)
    return [run for control in controls for run in runs_of(control, comparison)]


def results_of(runs: Sequence[Run], workplace: Workplace) -> list[Result]:
    """Return the results of the runs that are done, in the order of the runs.

    Args:
        runs: Runs of a comparison.
        workplace: Folder of the comparison.
    """
    return [result for run in runs if (result := read_result(workplace.run_folder(run))) is not None]


def collect(comparison: Comparison, variants: Sequence[Variant]) -> tuple[Result | None, list[Result], int]:
    """Return all results that a comparison has so far.

    Args:
        comparison: Comparison that `plan` returned.
        variants: Variants that `plan` returned.

    Returns:
        The result of the base, None if there is none yet; the results of all runs that are done, null controls included; and
        the number of runs that are not done.
    """
    workplace = Workplace(Path(comparison.output_dir))
    results: list[Result] = []
    missing = 0
    for variant in variants:
        runs = runs_of(variant, comparison)
        own = results_of(runs, workplace)
        controls = control_runs(variant, own, comparison)
        of_controls = results_of(controls, workplace)
        results += [*own, *of_controls]
        missing += len(runs) + len(controls) - len(own) - len(of_controls)
    return read_result(workplace.root / BASE), results, missing

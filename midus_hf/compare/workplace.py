"""The folder of a comparison: its layout, its results, and the removal of models that were measured."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from midus_hf.compare.learning import best_rate
from midus_hf.compare.options import Comparison
from midus_hf.compare.results import Result, read_result
from midus_hf.compare.runs import Run, runs_of
from midus_hf.compare.variants import Variant, control_variants
from midus_hf.config.fetched_blocks import BANKS_FOLDER
from midus_hf.files.checkpoint_files import (
    CONFIG_FILE,
    OF_UPSCALED,
    TEMPLATES_FOLDER,
    UNFINISHED_RUN,
    indexed_weights,
    is_begun_run,
    is_of,
)
from midus_hf.files.ownership import is_replaceable

BASE = "base"


class Workplace:
    """The folder of a comparison, which need not exist.

    `runs/VARIANT/RATE/seed-N` holds a run with its result and its logs, `models` the upscaled models while runs need them, `base` the
    result of the base. Reports lie in the folder itself.
    """

    def __init__(self, root: Path):
        self.root = root
        self.models = root / "models"

    def run_folder(self, run: Run) -> Path:
        """Return the folder of a run."""
        return self.root / "runs" / run.name

    def remove_trained(self, output: Path) -> None:
        """Remove what training wrote to a folder, by its names, and the folder if it is empty then."""
        if not output.is_dir():
            return
        shards = indexed_weights(output)
        for path in sorted(output.iterdir()):
            if path.is_dir():
                if is_begun_run(path.name) or path.name in (BANKS_FOLDER, TEMPLATES_FOLDER):
                    shutil.rmtree(path)
            elif path.name in shards or is_of(path.name, OF_UPSCALED, UNFINISHED_RUN):
                path.unlink()
        if not any(output.iterdir()):
            output.rmdir()

    def remove_upscaled(self, name: str) -> None:
        """Remove an upscaled model with its report and lock, unless somebody else put files into the model's folder."""
        model = self.models / name
        if model.is_dir() and not is_replaceable(model):
            return
        # The report goes first: while it exists, the model counts as complete.
        for beside in (self.models / f"{name}.json", self.models / f".{name}.lock"):
            beside.unlink(missing_ok=True)
        remove_upscaled(model)
        if self.models.is_dir() and not any(self.models.iterdir()):
            self.models.rmdir()


def remove_upscaled(folder: Path) -> None:
    """Remove a model that `upscale` wrote, unless somebody else put files into its folder."""
    if folder.is_dir() and is_replaceable(folder):
        # The config goes last: it marks a half-removed folder as a model of ours, which `upscale --overwrite` may replace.
        for path in sorted(folder.iterdir(), key=lambda path: path.name == CONFIG_FILE):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        folder.rmdir()


def control_runs(variant: Variant, results: Sequence[Result], comparison: Comparison) -> list[Run]:
    """Return the runs of a variant's null controls, at the variant's best rate."""
    if not (results and variant.controls and variant.upscale is not None):
        return []
    rate = best_rate(results, list(comparison.domain))
    controls = control_variants(variant, results[0].controls, rate)
    return [run for control in controls for run in runs_of(control, comparison)]


def results_of(runs: Sequence[Run], workplace: Workplace) -> list[Result]:
    """Return the results of the runs that are done, in the order of the runs."""
    return [result for run in runs if (result := read_result(workplace.run_folder(run))) is not None]


def collect(comparison: Comparison, variants: Sequence[Variant]) -> tuple[Result | None, list[Result], int]:
    """Return the result of the base, if there is one, the results of all runs that are done, and the number of the others."""
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

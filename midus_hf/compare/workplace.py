"""The folder of a comparison: where everything is, and what of it goes when it has been measured."""

import shutil
from pathlib import Path

from midus_hf.compare.cells import Cell
from midus_hf.files.checkpoint_files import CONFIG_FILE

BASE = "base"


class Workplace:
    """The folder of a comparison.

    `cells/ARM/RATE/seed-N` holds a run with its result and its logs, `models` the upscaled models as long as a run needs them, `base`
    what was measured of the base, and reports stand beside these.

    Args:
        root: The folder; it need not exist.
    """

    def __init__(self, root: Path):
        self.root = root
        self.models = root / "models"

    def cell(self, cell: Cell) -> Path:
        """The folder of a cell."""
        return self.root / "cells" / cell.name

    def remove_run(self, run: Path) -> None:
        """Remove what a training run wrote, and its folder if nothing else is in it.

        Args:
            run: Folder of the run; it need not exist.
        """
        from midus_hf.files.run_files import remove_written

        if not run.is_dir():
            return
        remove_written(run, run)
        if not any(run.iterdir()):
            run.rmdir()

    def remove_upscaled(self, name: str) -> None:
        """Remove an upscaled model; one that a person has put something into stays.

        Args:
            name: `Cell.upscaled_name`.
        """
        model = self.models / name
        if model.is_dir() and not _is_ours_alone(model):
            return
        # What says that the model is there goes first.
        for beside in (self.models / f"{name}.json", self.models / f".{name}.lock"):
            beside.unlink(missing_ok=True)
        remove_upscaled(model)
        if self.models.is_dir() and not any(self.models.iterdir()):
            self.models.rmdir()


def remove_upscaled(folder: Path) -> None:
    """Remove a model that `upscale` wrote; one that a person has put something into stays.

    Args:
        folder: Of the model; it need not exist.
    """
    if folder.is_dir() and _is_ours_alone(folder):
        # As long as its config is there, half of it is known as a model of ours, which `upscale --overwrite` replaces.
        for path in sorted(folder.iterdir(), key=lambda path: path.name == CONFIG_FILE):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        folder.rmdir()


def _is_ours_alone(folder: Path) -> bool:
    from midus_hf.files.ownership import is_replaceable

    return is_replaceable(folder)

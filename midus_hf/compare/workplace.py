"""The folder of a comparison: its layout, and the removal of models that were measured."""

import shutil
from pathlib import Path

from midus_hf.compare.runs import Run
from midus_hf.files.checkpoint_files import CONFIG_FILE

BASE = "base"


class Workplace:
    """The folder of a comparison.

    `runs/VARIANT/RATE/seed-N` holds a run with its result and its logs, `models` the upscaled models while runs need them, `base`
    the result of the base. Reports lie in the folder itself.

    Args:
        root: Path of the folder, which need not exist.
    """

    def __init__(self, root: Path):
        self.root = root
        self.models = root / "models"

    def run_folder(self, run: Run) -> Path:
        """Return the folder of a run."""
        return self.root / "runs" / run.name

    def remove_trained(self, output: Path) -> None:
        """Remove the files that training wrote to a folder, and the folder if it is empty then.

        Args:
            output: Output folder of `midus train` or `midus sft`, which need not exist.
        """
        from midus_hf.files.run_files import remove_written

        if not output.is_dir():
            return
        remove_written(output, output)
        if not any(output.iterdir()):
            output.rmdir()

    def remove_upscaled(self, name: str) -> None:
        """Remove an upscaled model with its report and lock, unless somebody else put files into the model's folder.

        Args:
            name: Name of the model, from `Run.upscaled_name`.
        """
        model = self.models / name
        if model.is_dir() and not _is_ours_alone(model):
            return
        # The report goes first: while it exists, the model counts as complete.
        for beside in (self.models / f"{name}.json", self.models / f".{name}.lock"):
            beside.unlink(missing_ok=True)
        remove_upscaled(model)
        if self.models.is_dir() and not any(self.models.iterdir()):
            self.models.rmdir()


def remove_upscaled(folder: Path) -> None:
    """Remove a model that `upscale` wrote, unless somebody else put files into its folder.

    Args:
        folder: Folder of the model, which need not exist.
    """
    if folder.is_dir() and _is_ours_alone(folder):
        # The config goes last: it marks a half-removed folder as a model of ours, which `upscale --overwrite` may replace.
        for path in sorted(folder.iterdir(), key=lambda path: path.name == CONFIG_FILE):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        folder.rmdir()


def _is_ours_alone(folder: Path) -> bool:
    """Return whether a folder holds nothing but what `upscale` wrote."""
    from midus_hf.files.ownership import is_replaceable

    return is_replaceable(folder)

"""What can be wrong with a comparison, seen before anything runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from midus_hf.config_file import from_mapping
from midus_hf.sft.options import SftConfig
from midus_hf.training.options import TrainConfig
from midus_workbench.arms import Arm
from midus_workbench.cells import cells_of
from midus_workbench.options import Comparison


def check(comparison: Comparison, arms: Sequence[Arm]) -> None:
    """See that a comparison can be run: that its texts are there, some of the domain among them, and its runs right.

    Args:
        comparison: From `plan`.
        arms: From `plan`.

    Raises:
        ValueError: If a key is unknown or a value out of range, or a text does not exist.
    """
    if not comparison.domain:
        raise ValueError("domain is empty; expected held-out text by which learning is measured, by name.")
    for kind in ("domain", "retention"):
        for name, path in getattr(comparison, kind).items():
            if not Path(path).exists():
                raise ValueError(
                    f"{kind}.{name} is {path!r}, which does not exist; expected a file or a folder of text."
                )
    check_runs(comparison, arms)


def check_runs(comparison: Comparison, arms: Sequence[Arm]) -> None:
    """See that every run is one that `midus-train`, and `midus-sft` behind it, take.

    Args:
        comparison: From `plan`.
        arms: From `plan`.

    Raises:
        ValueError: If a key is unknown or a value out of range, or the output is a file.
    """
    output = Path(comparison.output)
    if output.exists() and not output.is_dir():
        raise ValueError(f"output is {comparison.output!r}, a file; expected a folder.")
    for arm in arms:
        for cell in cells_of(arm, comparison):
            keys = cell.training_keys(comparison, model="model", output=Path("run"))
            _check_keys(arm, "midus-train", TrainConfig, keys)
            if arm.fine_tune is not None:
                _check_keys(arm, "midus-sft", SftConfig, cell.fine_tuning_keys("model", Path("tuned")))


def _check_keys(arm: Arm, command: str, options: type, keys: Mapping[str, Any]) -> None:
    try:
        from_mapping(options, keys)
    except ValueError as error:
        raise ValueError(f"arms.{arm.name}, as a run of {command}: {error}") from error

"""What can be wrong with a comparison, seen before anything runs."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from midus_hf.config_file import from_mapping
from midus_hf.training.held_out import check_held_out
from midus_hf.training.options import TrainConfig
from midus_hf.training.rates import Rates
from midus_workbench.arms import Arm
from midus_workbench.cells import cells_of
from midus_workbench.options import Comparison

_RATES = [field.name for field in dataclasses.fields(Rates) if isinstance(field.default, float | None)]
"""Keys of rates that are numbers."""


def check(comparison: Comparison, arms: Sequence[Arm]) -> None:
    """See that every run of a comparison is one that `midus-train` takes, and that its texts are there.

    Args:
        comparison: From `plan`.
        arms: From `plan`.

    Raises:
        ValueError: If a key is unknown or a value out of range, or a text does not exist.
    """
    for kind in ("domain", "retention"):
        for name, path in getattr(comparison, kind).items():
            if not Path(path).exists():
                raise ValueError(
                    f"{kind}.{name} is {path!r}, which does not exist; expected a file or a folder of text."
                )
    assert isinstance(comparison.train, Mapping), "files have been read"
    output = Path(comparison.output)
    if output.exists() and not output.is_dir():
        raise ValueError(f"output is {comparison.output!r}, a file; expected a folder.")
    for arm in arms:
        for key in {key for rate in arm.rates for key in rate}:
            if key not in _RATES:
                raise ValueError(f"arms.{arm.name} has a rate {key!r}; expected one of: {', '.join(_RATES)}.")
        most, of_all = arm.train.get("eval_max_tokens"), comparison.train.get("eval_max_tokens")
        if most != of_all:
            raise ValueError(
                f"arms.{arm.name}.train.eval_max_tokens is {most}, and that of all is {of_all}; expected the same, since all are "
                "measured alike. Set train.eval_max_tokens."
            )
        for cell in cells_of(arm, comparison):
            keys = cell.training_keys(comparison, model="model", output=Path("run"))
            try:
                check_held_out(from_mapping(TrainConfig, keys))
            except ValueError as error:
                raise ValueError(f"arms.{arm.name}, as a run of midus-train: {error}") from error

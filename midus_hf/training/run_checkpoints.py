"""The checkpoints that lie in the output of a run: which are whole, which is the latest, which have had their time."""

import json
import os
from pathlib import Path

from midus_config.checkpoint_files import CHECKPOINT_NAME, TRAINER_STATE
from midus_hf.training.written_files import remove_written


def last_checkpoint(output: str | os.PathLike) -> Path | None:
    """The latest checkpoint in `output` that was written to its end, or None."""
    complete = {step: path for step, path in checkpoints(output).items() if is_complete(path)}
    return complete[max(complete)] if complete else None


def checkpoints(output: str | os.PathLike) -> dict[int, Path]:
    """The checkpoints in `output` by their steps, those included that were not written to their end."""
    output = Path(output)
    return {
        int(match[1]): path
        for path in (output.iterdir() if output.is_dir() else ())
        if (match := CHECKPOINT_NAME.fullmatch(path.name)) and path.is_dir()
    }


def remove_old_checkpoints(output: str | os.PathLike, step: int, keep: int | None, best: int | None = None) -> None:
    """Remove checkpoints until `keep` are left: first those that are not whole or lie beyond `step`, then the oldest.

    What a person has put into one stays.

    Args:
        output: The folder of the run.
        step: Where the run is. A checkpoint beyond it is from before the run was resumed at an earlier one.
        keep: How many to keep; None for all.
        best: The step of one to keep beside these. Default: none.
    """
    if keep is None:
        return
    found = {number: path for number, path in checkpoints(output).items() if number != best}
    order = sorted(found, key=lambda number: (number <= step and is_complete(found[number]), number))
    for number in order[: max(len(order) - keep, 0)]:
        remove_written(output, found[number] / TRAINER_STATE)  # first: what is left if this ends here is no checkpoint
        remove_written(output, found[number])


def is_complete(checkpoint: Path) -> bool:
    """Whether the file that a Trainer writes last is there and whole.

    Args:
        checkpoint: Its folder.
    """
    try:
        json.loads((checkpoint / TRAINER_STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True

"""`python -m midus_hf.compare.cell_process FILE`: one cell, from upscaling to its result. Another process starts it."""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from midus_hf.compare.arms import Arm
from midus_hf.compare.cells import Cell
from midus_hf.compare.commands import Commands, StepFailed, ask_for_termination
from midus_hf.compare.measuring import measure_base, measure_cell
from midus_hf.compare.options import Comparison
from midus_hf.compare.results import read_result
from midus_hf.compare.workplace import BASE, Workplace
from midus_hf.files.locks import alone

SPECIFICATION = "cell.json"
FAILURE = "failed.txt"


def specify(cell: Cell | None, comparison: Comparison, place: Workplace) -> Path:
    """Write down what a process is to do.

    Args:
        cell: Of the comparison; None for the base.
        comparison: What is asked for.
        place: Where it is.

    Returns:
        The file.
    """
    folder = place.root / BASE if cell is None else place.cell(cell)
    folder.mkdir(parents=True, exist_ok=True)
    told: dict[str, Any] = {"comparison": dataclasses.asdict(comparison), "parent": os.getpid()}
    if cell is not None:
        told["cell"] = dataclasses.asdict(cell)
    (folder / SPECIFICATION).write_text(json.dumps(told, indent=1), encoding="utf-8")
    (folder / FAILURE).unlink(missing_ok=True)
    return folder / SPECIFICATION


def main(specification: Path) -> None:
    """Do what a file says, and end with status 1 and a line in a file beside it if that fails.

    Args:
        specification: From `specify`.
    """
    from midus_hf.config.yaml_options import from_mapping

    told = json.loads(specification.read_text(encoding="utf-8"))
    ask_for_termination(told["parent"])
    comparison = from_mapping(Comparison, told["comparison"])
    folder, place = specification.parent, Workplace(Path(comparison.output_dir))
    # Of a comparison that was killed, the command that worked here may still be saving.
    with alone(folder) as held:
        if read_result(folder) is not None:
            return
        commands = Commands(folder / "logs", held)
        commands.hear_signals()
        try:
            if "cell" in told:
                cell = Cell(**{**told["cell"], "arm": Arm(**told["cell"]["arm"])})
                measure_cell(cell, comparison, place, commands)
            else:
                measure_base(comparison, place, commands)
        except StepFailed as failure:
            (folder / FAILURE).write_text(f"{failure}\n", encoding="utf-8")
            sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

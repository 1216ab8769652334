"""`python -m midus_hf.compare.cell_process FILE`: one run from upscaling to its result; the process of the comparison starts it."""

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


def specify(cell: Cell | None, comparison: Comparison, workplace: Workplace) -> Path:
    """Write the specification of one run to a file in the run's folder, and remove the failure of an earlier attempt.

    Args:
        cell: A run of the comparison; None for the base.
        comparison: The comparison, resolved by `plan`.
        workplace: Folder of the comparison.

    Returns:
        Path of the specification, JSON.
    """
    folder = workplace.root / BASE if cell is None else workplace.cell(cell)
    folder.mkdir(parents=True, exist_ok=True)
    values: dict[str, Any] = {"comparison": dataclasses.asdict(comparison), "parent": os.getpid()}
    if cell is not None:
        values["cell"] = dataclasses.asdict(cell)
    (folder / SPECIFICATION).write_text(json.dumps(values, indent=1), encoding="utf-8")
    (folder / FAILURE).unlink(missing_ok=True)
    return folder / SPECIFICATION


def main(specification: Path) -> None:
    """Do the run of a specification. If a step fails, write why to a file beside the specification and exit with status 1.

    Args:
        specification: Path that `specify` returned.
    """
    from midus_hf.config.yaml_options import from_mapping

    values = json.loads(specification.read_text(encoding="utf-8"))
    ask_for_termination(values["parent"])
    comparison = from_mapping(Comparison, values["comparison"])
    folder, workplace = specification.parent, Workplace(Path(comparison.output_dir))
    # A comparison that was killed may have left a command that still saves to this folder; wait for that command.
    with alone(folder) as held:
        if read_result(folder) is not None:
            return
        commands = Commands(folder / "logs", held)
        commands.hear_signals()
        try:
            if "cell" in values:
                cell = Cell(**{**values["cell"], "arm": Arm(**values["cell"]["arm"])})
                measure_cell(cell, comparison, workplace, commands)
            else:
                measure_base(comparison, workplace, commands)
        except StepFailed as failure:
            (folder / FAILURE).write_text(f"{failure}\n", encoding="utf-8")
            sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

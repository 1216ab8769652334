"""`python -m midus_hf.compare.run_process FILE`: one run from upscaling to its result; the process of the comparison starts it."""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from midus_hf.compare.commands import Commands, StepFailed, ask_for_termination
from midus_hf.compare.measuring import measure_base, measure_run
from midus_hf.compare.options import Comparison
from midus_hf.compare.results import read_result
from midus_hf.compare.runs import Run
from midus_hf.compare.variants import Variant
from midus_hf.compare.workplace import BASE, Workplace
from midus_hf.files.locks import alone

SPECIFICATION = "run.json"
FAILURE = "failed.txt"


def specify(run: Run | None, comparison: Comparison, workplace: Workplace) -> Path:
    """Write the specification of one run to a file in the run's folder, and remove the failure of an earlier attempt."""
    folder = workplace.root / BASE if run is None else workplace.run_folder(run)
    folder.mkdir(parents=True, exist_ok=True)
    values: dict[str, Any] = {"comparison": dataclasses.asdict(comparison), "parent": os.getpid()}
    if run is not None:
        values["run"] = dataclasses.asdict(run)
    (folder / SPECIFICATION).write_text(json.dumps(values, indent=1), encoding="utf-8")
    (folder / FAILURE).unlink(missing_ok=True)
    return folder / SPECIFICATION


def main(specification: Path) -> None:
    """Do the run of a specification. If a step fails, write why to a file beside the specification and exit with status 1."""
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
            if "run" in values:
                run = Run(**{**values["run"], "variant": Variant(**values["run"]["variant"])})
                measure_run(run, comparison, workplace, commands)
            else:
                measure_base(comparison, workplace, commands)
        except StepFailed as failure:
            (folder / FAILURE).write_text(f"{failure}\n", encoding="utf-8")
            sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

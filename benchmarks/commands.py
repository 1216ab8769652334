"""Steps of a benchmark that are commands which a person would type."""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

_BIN = Path(sys.executable).parent


def run_command(command: Any, *words: Any) -> str:
    """Run a command of this environment, which is told on standard error; returns what it printed.

    Raises:
        SystemExit: If its status is not 0.
    """
    line = [str(_BIN / str(command)), *map(str, words)]
    print(f"$ {shlex.join(line)}", file=sys.stderr, flush=True)
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{line[0]} ended with status {done.returncode}")
    return done.stdout


def run_once(output: Path, *words: Any) -> None:
    """Run what writes the model `output`, if it is not there; training that was interrupted goes on.

    What a training run began and saved no checkpoint of is begun again.
    """
    if (output / "config.json").is_file():
        return
    began = (output / "train_config.yaml").is_file()
    going_on = "resume=auto" if any(output.glob("checkpoint-*")) else "overwrite=true"
    run_command(*words, *([going_on] if began else []))

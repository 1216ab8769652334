"""Steps of studies: commands that a person would type, what they are told, and where results lie."""

import argparse
import json
import math
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.study import Row, command_line

_BIN = Path(sys.executable).parent
_RESULTS = Path(__file__).parent / "results"

FROM_NOTHING = {
    "trainable": "all",
    "gradient_accumulation_steps": 1,
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "warmup_ratio": 0.05,
    "min_learning_rate_ratio": 0.1,
    "bf16": False,
    "logging_steps": 20,
}
"""What `midus train` is told of small models that are trained from the beginning."""

OF_BLOCKS = {
    "value_schedule": "fixed",
    "value_weight_decay": 1e-3,
    "adam_beta2": 0.95,
    "sequence_length": 128,
    "document_mask": True,
    "bf16": False,
}
"""What it is told where the blocks of a bank are trained, and nothing else."""


def study(
    description: str | None, work: str | None = "models, which a later run goes on with"
) -> argparse.ArgumentParser:
    """Return the command line of a study, with `--work`, a folder for what is named; None for a study that needs no folder."""
    parser = command_line(description)
    if work is not None:
        parser.add_argument("--work", type=Path, required=True, help=f"folder for {work}")
    return parser


def results_of(name: str, arguments: argparse.Namespace) -> Path | None:
    """Return the CSV of a study, or None where `--no-append` says that nothing is kept."""
    return None if arguments.no_append else _RESULTS / f"{name}.csv"


def run_command(command: Any, *words: Any) -> str:
    """Run a command of this environment, which is told on standard error; returns what it printed.

    Raises:
        SystemExit: If its status is not 0.
    """
    program, *names = command.split()
    line = [str(_BIN / program), *names, *map(str, words)]
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
    going_on = "resume_from_checkpoint=auto" if any(output.glob("checkpoint-*")) else "overwrite_output_dir=true"
    run_command(*words, *([going_on] if began else []))


def train_once(
    output: Path, options: Mapping[str, Any], command: str = "midus train", recipe: Path | None = None
) -> None:
    """Train the model `output`, if it is not there.

    Args:
        output: Folder of the model; what the run is told lies beside it.
        options: Of the run.
        command: Default: `midus train`.
        recipe: A file of options that these replace. Default: none.
    """
    keys = {**options, "output": output}
    if recipe is None:
        recipe = output.with_name(f"{output.name}.recipe.json")
        recipe.write_text(json.dumps(keys, default=str), encoding="utf-8")  # JSON is YAML as well
        run_once(output, command, recipe)
    else:
        run_once(output, command, recipe, *(f"{key}={value}" for key, value in keys.items()))


def upscale_once(output: Path, base: Path, method: str, seed: int, *words: Any, **options: Any) -> dict[str, int]:
    """Upscale a base, if that is not done; return the counts of parameters that `upscale` wrote down."""
    words = (*words, *(word for name, value in options.items() for word in ("--set", f"{name}={value}")))
    run_once(output, "upscale", "--base", base, "--method", method, *words, "--seed", seed, "--output", output)
    return json.loads((output / "upscale.json").read_text(encoding="utf-8"))["parameters"]


def evaluated(model: Path, *words: Any) -> dict[str, Any]:
    """Return what `midus eval --json` tells of a model."""
    return json.loads(run_command("midus eval", model, "--json", *words))["models"][0]


def loss_of(model: Path, text: Path, *words: Any) -> float:
    """Return the loss of a text, in nats per token."""
    return math.log(evaluated(model, "--text", text, *words)["perplexity"]["perplexity"])


def events_of(run: Path) -> list[dict[str, Any]]:
    """Return what a training run logged."""
    return read_rows(run / "log.jsonl")


def remembered(file: Path, measure: Callable[[], Row]) -> tuple[Row, bool]:
    """Return a row, measured if the file is not there, which then holds it; and whether it was measured."""
    is_new = not file.is_file()
    if is_new:
        file.write_text(json.dumps(measure()), encoding="utf-8")
    return json.loads(file.read_text(encoding="utf-8")), is_new


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write a file of JSON lines; returns its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path

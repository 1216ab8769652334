"""A comparison that takes seconds: a tiny model of bytes, texts of four words, and commands that run in this process."""

import contextlib
import io
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from commands.installed import main_of
from evaluation.byte_models import save_byte_model

from midus_hf.compare.commands import Done, StepFailed
from midus_hf.compare.measuring import measure_base, measure_run
from midus_hf.compare.options import Comparison
from midus_hf.compare.results import Result, read_result
from midus_hf.compare.runs import Run, runs_of
from midus_hf.compare.variants import plan
from midus_hf.compare.workplace import BASE, Workplace
from midus_hf.config.yaml_options import from_mapping

WORDS = ("alpha", "beta", "gamma", "delta")
HEADWISE = {"method": "midus-hml", "num_new_layers": 2, "options": {"n": 4, "k": 2}}
STEPS = 4
TOKENS_PER_STEP = 64


def write_room(folder: Path) -> Path:
    """Write a base, a corpus, a text of its words and one of others."""
    save_byte_model("llama", folder / "base", max_position_embeddings=64)
    choice = random.Random(0)
    (folder / "corpus").mkdir()
    for name, length in (("corpus/1.txt", 120), ("corpus/2.txt", 120), ("plants.txt", 30)):
        (folder / name).write_text(" ".join(choice.choice(WORDS) for _ in range(length)))
    (folder / "stars.txt").write_text("Stars are far away. " * 8)
    return folder


def training(room: Path, **changes: Any) -> dict[str, Any]:
    """Keys of runs of a few steps, with measurements at the start, in the middle and at the end."""
    run = {
        "max_steps": STEPS,
        "sequence_length": 32,
        "per_device_train_batch_size": 2,
        "bf16": False,
        "logging_steps": 1,
    }
    return {"corpus": str(room / "corpus"), "learning_rate": 1e-2, **run, **changes}


def keys(room: Path, output: Path, variants: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """What a file would say of a comparison of one seed."""
    train = training(room, **changes.pop("train", {}))
    texts = {"domain": {"plants": str(room / "plants.txt")}, "retention": {"stars": str(room / "stars.txt")}}
    told = {"base": str(room / "base"), "output_dir": str(output), "variants": variants, "train": train, **texts}
    return {**told, "seeds": [0], "evaluations": 2, **changes}


class InProcess:
    """Runs commands as `Commands` does, without processes.

    Args:
        fails: Name of a step that ends with status 1 in place of being run. Default: none.
    """

    def __init__(self, fails: str | None = None):
        self.fails = fails
        self.steps: list[str] = []

    def run(self, step: str, command: str, *words: Any) -> Done:
        self.steps.append(step)
        if step == self.fails:
            raise StepFailed(f"{command} ended with status 1")
        printed, before = io.StringIO(), sys.argv
        sys.argv = [*command.split(), *map(str, words)]
        try:
            with contextlib.redirect_stdout(printed):
                status = main_of(command)()
        except SystemExit as stopped:
            status = stopped.code
        finally:
            sys.argv = before
        if status:
            raise StepFailed(f"{command} ended with status {status}")
        return Done(printed.getvalue(), 1)


class Measured:
    """A comparison whose runs are measured in this process.

    Args:
        room: From `write_room`.
        output: Of the comparison.
        variants: As in a file.
        changes: Of other keys.
    """

    def __init__(self, room: Path, output: Path, variants: dict[str, Any], **changes: Any):
        self.comparison, self.variants = plan(from_mapping(Comparison, keys(room, output, variants, **changes)))
        self.place = Workplace(output)
        self.commands = InProcess()

    def runs(self) -> list[Run]:
        """Return all runs but those of null controls."""
        return [run for variant in self.variants for run in runs_of(variant, self.comparison)]

    def measure_base(self) -> Result:
        """Measure the base."""
        (self.place.root / BASE).mkdir(parents=True, exist_ok=True)
        measure_base(self.comparison, self.place, self.commands)
        return self._result(self.place.root / BASE)

    def measure(self, run: Run) -> Result:
        """Measure a run."""
        self.place.run_folder(run).mkdir(parents=True, exist_ok=True)
        measure_run(run, self.comparison, self.place, self.commands)
        return self._result(self.place.run_folder(run))

    def paths(self, run: Run) -> SimpleNamespace:
        """Return the folder, the trained and the upscaled model of a run."""
        folder = self.place.run_folder(run)
        return SimpleNamespace(
            folder=folder, trained=folder / "trained", model=self.place.models / str(run.upscaled_name)
        )

    def _result(self, folder: Path) -> Result:
        result = read_result(folder)
        assert result is not None
        return result

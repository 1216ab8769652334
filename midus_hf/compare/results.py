"""Result of one run, as a JSON file."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from midus_hf.files.whole_files import whole_file

RESULT_FILE = "result.json"


@dataclasses.dataclass(frozen=True)
class Point:
    """Losses of the texts at one step of a run.

    Args:
        step: Optimizer steps taken; 0 at the start.
        tokens: Number of tokens trained on.
        seconds: Seconds of training so far; None where the log has no time, as at the start.
        losses: Loss in nats per token, by the name of the text.
    """

    step: int
    tokens: int
    seconds: float | None
    losses: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Measured:
    """Losses and task metrics of one model.

    Args:
        losses: Loss in nats per token, by the name of the text.
        tasks: Metrics by name, by the name of the task.
    """

    losses: Mapping[str, float]
    tasks: Mapping[str, Mapping[str, float]]


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of a run, or of the base.

    Args:
        variant: Name of the variant; `base` for the base.
        rate: Rate keys with their values; empty where the run used the rates of the recipe.
        seed: Seed of the run; 0 for the base.
        curve: Losses from the start to the end of training; a single point for the base.
        tasks_before: Metrics by task of the model that training began with.
        tasks: Metrics by task of the trained model.
        shuffled: Losses by text after the rows of the trained model's value tables were permuted; None if not measured.
        unshuffled: Losses by text of the same model before the permutation, measured with the same command; None if not measured.
        tuned: Losses and metrics after fine-tuning; None if the model was not fine-tuned.
        controls: Null controls that the memory has, by name, with what each changes.
        control: Name of the null control that the run is; None if it is none.
        control_of: Name of the variant that the null control belongs to; None if the run is no null control.
        new_parameters: Number of parameters that the base does not have.
        trained_parameters: Number of parameters that were trained.
        starts_at_base: Whether the upscaled model was verified to compute bit for bit what the base computes; None where nothing was
            upscaled or nothing verified.
        is_causal: Whether every token of the upscaled model is computed without later tokens.
        seconds: Seconds of training.
        peak_memory_bytes: Peak memory of the training process: what PyTorch allocated on a GPU, else the resident memory.
        request: Everything that the result depends on, from `Run.request` or `base_request`; empty in results of the base that older
            versions wrote.
    """

    variant: str
    rate: Mapping[str, float]
    seed: int
    curve: list[Point]
    tasks_before: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    tasks: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    shuffled: Mapping[str, float] | None = None
    unshuffled: Mapping[str, float] | None = None
    tuned: Measured | None = None
    controls: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    control: str | None = None
    control_of: str | None = None
    new_parameters: int = 0
    trained_parameters: int = 0
    starts_at_base: bool | None = None
    is_causal: bool = True
    seconds: float = 0.0
    peak_memory_bytes: int = 0
    request: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def start(self) -> Point:
        """Losses of the model that training began with."""
        return self.curve[0]

    @property
    def end(self) -> Point:
        """Losses of the trained model."""
        return self.curve[-1]

    def end_of(self, tuned: bool) -> Measured | None:
        """Return the losses and metrics of the trained or of the fine-tuned model."""
        if tuned:
            return self.tuned
        return Measured(self.curve[-1].losses if self.curve else {}, self.tasks)


def read_result(folder: Path) -> Result | None:
    """Return the result in the folder of a run or of the base; None if there is no result yet."""
    path = folder / RESULT_FILE
    if not path.is_file():
        return None
    values = json.loads(path.read_text(encoding="utf-8"))
    tuned = values.get("tuned")
    inner = {
        "curve": [Point(**point) for point in values["curve"]],
        "tuned": None if tuned is None else Measured(**tuned),
    }
    return Result(**{**values, **inner})


def write_result(folder: Path, result: Result) -> None:
    """Write a result to the folder of a run or of the base, whole or not at all."""
    with whole_file(folder / RESULT_FILE) as path:
        path.write_text(json.dumps(dataclasses.asdict(result), indent=1), encoding="utf-8")

"""What was measured of one cell, as a file of JSON."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from midus_hf.files.whole_files import whole_file

RESULT_FILE = "result.json"


@dataclasses.dataclass(frozen=True)
class Point:
    """Texts as measured at one moment of a run.

    Args:
        step: Optimizer steps taken.
        tokens: Tokens trained on.
        seconds: Of training until then; None where the log has no time, as at the start.
        losses: In nats per token, by the name of the text.
    """

    step: int
    tokens: int
    seconds: float | None
    losses: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was measured of a model.

    Args:
        losses: In nats per token, by the name of the text.
        tasks: Metrics by task.
    """

    losses: Mapping[str, float]
    tasks: Mapping[str, Mapping[str, float]]


@dataclasses.dataclass(frozen=True)
class Result:
    """What was measured of a cell, or of the base.

    Args:
        arm: Name of the arm; `base` of the base.
        rate: Keys of rates with their values; empty where the recipe's own were used.
        seed: Of the run.
        curve: From the start to the end; of the base one point.
        tasks_before: Metrics by task, of the model that training began with.
        tasks: Metrics by task, of the trained model.
        shuffled: Losses of the trained model after the rows of its value tables were permuted, by text; None if that was not done.
        unshuffled: Its losses before that, measured in the same way; None if that was not done.
        tuned: Losses by text, and metrics by task, after fine-tuning; None where that was not done.
        controls: Null controls that its memory has, by name, with what each changes.
        control: Which null control it is; None if none.
        control_of: Of which arm.
        new_parameters: That the base does not have.
        trained_parameters: That trained.
        starts_at_base: Whether the upscaled model was seen to compute what the base computes, bit for bit; None where nothing was
            upscaled.
        is_causal: Whether no token of the upscaled model is told of later ones.
        seconds: Of training.
        peak_memory_bytes: Of the training process: on a GPU what PyTorch allocated there, else its resident memory.
        request: What was asked for.
    """

    arm: str
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
        """Of the model that training began with."""
        return self.curve[0]

    @property
    def end(self) -> Point:
        """Of the trained model."""
        return self.curve[-1]

    def end_of(self, tuned: bool) -> Measured | None:
        """What was measured of the trained model, or of the fine-tuned one; None if there is none.

        Args:
            tuned: Which of them.
        """
        if tuned:
            return self.tuned
        return Measured(self.curve[-1].losses if self.curve else {}, self.tasks)


def read_result(folder: Path) -> Result | None:
    """The result in a folder; None if there is none yet.

    Args:
        folder: Of a cell.
    """
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
    """Write a result, whole or not at all.

    Args:
        folder: Of a cell.
        result: What was measured.
    """
    with whole_file(folder / RESULT_FILE) as path:
        path.write_text(json.dumps(dataclasses.asdict(result), indent=1), encoding="utf-8")

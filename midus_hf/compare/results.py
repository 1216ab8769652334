"""Results of runs, one JSON file each: its presence means that the run is done."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from midus_hf.files.outputs import whole_file


@dataclasses.dataclass(frozen=True)
class Point:
    """Losses of the texts, in nats per token by name, after `step` steps of training; of stages, after as many stages."""

    step: int
    losses: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Measured:
    """Losses in nats per token by text, and metrics by task and name, of one model."""

    losses: Mapping[str, float]
    tasks: Mapping[str, Mapping[str, float]]


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of a run, or of the base, whose curve is a single point.

    All losses are of packed sequences, in the precision of training; with stages they are of documents. `tasks` are metrics of the
    trained model, `tuned` what was measured after fine-tuning. `shuffled` are losses after the rows of the trained model's value
    tables were permuted, and `saved` the losses of this model before, with its weights as they are saved. `controls` are the null
    controls that the memory has, with what each changes; a run that is itself a null control has `control` and `control_of`, its
    name and its variant. `starts_at_base` says whether the upscaled model was verified to compute bit for bit what the base
    computes; None where nothing was upscaled or verified. `is_causal` says whether every token is computed without later tokens,
    `is_certified` whether the trained model came with a certificate of protected texts.
    `tokens` and `seconds` count training alone. `peak_memory_bytes` is what PyTorch allocated on a GPU, else the resident memory of
    the process, up to the end of training. Of a comparison with stages, the curve has the start and a point after each stage, and
    `routed` is the share of each stage's documents that were measured by the model of this stage, where stages have models of their
    own. `request` has all keys that the result depends on, and `origin` what they led to: digests of `data` and `base`, the `code`
    and the `machine`.
    """

    variant: str
    rate: Mapping[str, float]
    seed: int
    curve: list[Point]
    tasks: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    shuffled: Mapping[str, float] | None = None
    saved: Mapping[str, float] | None = None
    tuned: Measured | None = None
    controls: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    control: str | None = None
    control_of: str | None = None
    new_parameters: int = 0
    trained_parameters: int = 0
    tokens: int = 0
    starts_at_base: bool | None = None
    is_causal: bool = True
    is_certified: bool = False
    seconds: float = 0.0
    peak_memory_bytes: int = 0
    routed: Mapping[str, float] = dataclasses.field(default_factory=dict)
    request: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    origin: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def starts_elsewhere(self) -> bool:
        """True if the run upscaled, and the upscaled model was not verified to start from what the base computes."""
        return self.request.get("upscale") is not None and not self.starts_at_base

    @property
    def trains_all(self) -> bool:
        """True if the run trained all parameters of its model, as its keys say."""
        train = self.request.get("train") or {}
        return train.get("trainable") == "all" and not train.get("adapters")

    @property
    def start(self) -> Point:
        """Losses of the model that training began with."""
        return self.curve[0]

    @property
    def losses(self) -> Mapping[str, float]:
        """Losses of the trained model; empty if the comparison has no texts."""
        return self.curve[-1].losses if self.curve else {}


def result_file(folder: Path) -> Path:
    """Return the path of the result of the run with a folder."""
    return folder.parent / f"{folder.name}.json"


def log_file(folder: Path) -> Path:
    """Return the path of what the process of the run with a folder prints."""
    return folder.parent / f"{folder.name}.log"


def read_result(folder: Path) -> Result | None:
    """Return the result of the run with a folder; None if there is no result yet."""
    path = result_file(folder)
    if not path.is_file():
        return None
    values = json.loads(path.read_text(encoding="utf-8"))
    tuned = values["tuned"]
    values["curve"] = [Point(point["step"], point["losses"]) for point in values["curve"]]
    values["tuned"] = None if tuned is None else Measured(**tuned)
    known = {field.name for field in dataclasses.fields(Result)}  # older results, and their points, have more
    return Result(**{name: value for name, value in values.items() if name in known})


def write_result(folder: Path, result: Result) -> None:
    """Write the result of the run with a folder, whole or not at all."""
    path = result_file(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as partial:
        partial.write_text(json.dumps(dataclasses.asdict(result), indent=1), encoding="utf-8")

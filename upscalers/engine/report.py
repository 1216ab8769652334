"""What an upscaling did, or would do."""

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters; a tied language head counts once."""

    base: int
    new: int
    total: int
    trainable: int


@dataclass(frozen=True)
class Bytes:
    """Bytes read from the base and written to the output."""

    read: int
    written: int


@dataclass(frozen=True)
class Identity:
    """Whether the result computes what the base computes.

    Args:
        checked: `"logits"`: both models' logits on a fixed batch; `"blocks"`: each new block on random hidden states;
            None: not checked.
        max_abs_diff: The largest difference seen; 0.0 where the method promises identity.
    """

    checked: str | None
    max_abs_diff: float | None


@dataclass(frozen=True)
class UpscaleReport:
    """The object that `--json` prints.

    Args:
        method: Name of the method.
        base: As the person gave it.
        output: The folder; None for a dry run without one.
        model_type: Of the upscaled model.
        num_layers: L + K.
        new_layer_indices: In the upscaled model.
        parameters: Counts.
        bytes: Volumes; for a dry run, the output's size and nothing read.
        identity: What was verified.
        seconds: Wall time, without the program's start.
        peak_rss_bytes: The process's largest resident memory.
    """

    method: str
    base: str
    output: str | None
    model_type: str
    num_layers: int
    new_layer_indices: list[int]
    parameters: ParameterCounts
    bytes: Bytes
    identity: Identity
    seconds: float
    peak_rss_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return dataclasses.asdict(self)

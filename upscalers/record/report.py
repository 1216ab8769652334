"""What an upscaling did, or would do."""

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters; a tied language head counts once.

    Args:
        base: Of the base.
        new: In the checkpoint, that the base does not have.
        total: In the checkpoint.
        trainable: That the method trains.
        fetched: That each text fetches from new banks beside the checkpoint; None where there are none.
        bank: Of new banks, the generic memory not included; None where there are none.
    """

    base: int
    new: int
    total: int
    trainable: int
    fetched: int | None = None
    bank: int | None = None


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
    """What was done. `to_dict` gives the object that `--json` prints, which is all of it but the last four fields.

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
        promises_identity: Whether the method, with its options, promises that the result computes what the base computes.
        kl_divergence: From the base's next-token distribution to the result's, mean over tokens, in nats; None where
            logits were not compared.
        measurements: What solvers found out about each tensor that they made; empty for methods without solvers.
        renumbers_layers: Whether layers of the base have other numbers in the upscaled model.
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
    promises_identity: bool
    kl_divergence: float | None
    measurements: list[dict[str, Any]]
    renumbers_layers: bool

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, as `--json` prints it; `upscale.json` has the rest as well."""
        values = dataclasses.asdict(self)
        values["parameters"] = {name: count for name, count in values["parameters"].items() if count is not None}
        return {key: value for key, value in values.items() if key not in _NOT_PRINTED}


_NOT_PRINTED = ("promises_identity", "kl_divergence", "measurements", "renumbers_layers")


class PushError(RuntimeError):
    """The checkpoint is whole, but not on the hub.

    Args:
        message: What happened, and how to upload the folder.
        report: What was done until then.
        interrupted: Whether a person broke the upload off.
    """

    def __init__(self, message: str, report: UpscaleReport, interrupted: bool):
        super().__init__(message)
        self.report = report
        self.interrupted = interrupted

"""Report of what an upscaling did, or would do."""

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters; a tied head counts once. `fetched` and `bank` are of new banks, `trainable` of all that train."""

    base: int
    new: int
    total: int
    trainable: int
    fetched: int | None = None
    bank: int | None = None


@dataclass(frozen=True)
class Bytes:
    """Number of bytes read from the base, and of bytes written to the output, as weights and in banks."""

    read: int
    written: int


@dataclass(frozen=True)
class Identity:
    """Whether the result computes the same as the base: what was compared, the largest difference, and both sides in words."""

    checked: str | None
    max_abs_diff: float | None
    compared: str | None = dataclasses.field(default=None, repr=False)


@dataclass(frozen=True)
class UpscaleReport:
    """Report of an upscaling. `to_dict` returns what `--json` prints, which is all but the last five fields.

    Args:
        method: Name of the method.
        base: The base as given in the request.
        output: The output folder; None for a dry run without one.
        model_type: Model type of the upscaled model.
        num_layers: L + K, number of layers of the upscaled model.
        new_layer_indices: Indices of the new layers in the upscaled model.
        parameters: Parameter counts of base and result.
        bytes: Bytes read and written. For a dry run, the size of the output, and 0 bytes read.
        identity: Result of the check against the base.
        seconds: Wall time in seconds, without the start of the program.
        peak_rss_bytes: Largest resident memory of the process, in bytes.
        promises_identity: Whether the method, with its options, promises that the result computes what the base
            computes.
        identity_except: Exceptions to that, a noun phrase; None if it holds for all texts.
        kl_divergence: KL divergence from the base's next-token distribution to the result's, mean over tokens, in
            nats; None if nothing was compared, or the base has no token with finite logits.
        measurements: Measurements of solvers for each tensor they made; empty for methods without solvers.
        renumbers_layers: Whether layers of the base have different indices in the upscaled model.
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
    identity_except: str | None
    kl_divergence: float | None
    measurements: list[dict[str, Any]]
    renumbers_layers: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, as `--json` prints it; `upscale.json` holds the other fields too."""
        values = dataclasses.asdict(self)
        values["parameters"] = {name: count for name, count in values["parameters"].items() if count is not None}
        return {key: value for key, value in values.items() if key not in _NOT_PRINTED}


_NOT_PRINTED = ("promises_identity", "identity_except", "kl_divergence", "measurements", "renumbers_layers")


class PushError(RuntimeError):
    """Error for an upload that failed: the checkpoint is complete, but not on the hub.

    Args:
        message: What happened, and how to upload the folder.
        report: Report of the upscaling.
        interrupted: Whether the user interrupted the upload.
    """

    def __init__(self, message: str, report: UpscaleReport, interrupted: bool):
        super().__init__(message)
        self.report = report
        self.interrupted = interrupted

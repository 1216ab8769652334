"""What was done to a checkpoint: its record, in config and `upscale.json`, and the report of a run."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midus_hf.anatomy.record import RECORD_KEY, UpscaleRecord, has_record, record_of
from midus_hf.config.errors import RequestError
from midus_hf.files.checkpoint_files import RECORD_FILE, parse_json
from midus_hf.files.outputs import write_text
from midus_hf.files.secrets import for_record
from midus_hf.memories.registry import are_causal
from midus_hf.version import __version__
from upscalers.architecture.layer_tensors import Config
from upscalers.checkpoint.base_checkpoint import MOST_LAYERS, BaseCheckpoint
from upscalers.checkpoint.safetensors_format import TORCH_NAMES, read_tensor
from upscalers.plan import Plan
from upscalers.tensors.recipes import Measurement
from upscalers.upscaling import ParameterCounts, Upscaling

EDITS_KEY = "edits"


@dataclass(frozen=True)
class Bytes:
    """Number of bytes read from the base, and of bytes written to the output, as weights and in banks."""

    read: int
    written: int


@dataclass(frozen=True)
class Identity:
    """What was compared with the base, the largest difference, and both sides in words."""

    checked: str | None = None
    max_abs_diff: float | None = None
    compared: str | None = dataclasses.field(default=None, repr=False)


@dataclass(frozen=True)
class Done:
    """What became of an upscaling.

    Args:
        bytes: Bytes read and written; of a dry run, 0 and the size of the output.
        identity: Result of the check against the base. Default: nothing was compared.
        kl_divergence: From the base's next-token distribution to the result's, mean over tokens, in nats. Default: None, not
            compared.
        measurements: Measurements of solvers for each tensor they made. Default: none.
    """

    bytes: Bytes
    identity: Identity = Identity()
    kl_divergence: float | None = None
    measurements: Sequence[Measurement] = ()


def upscale_record(upscaling: Upscaling, base_sha256: str) -> UpscaleRecord:
    """Return the record that the config of the result has."""
    method = upscaling.method
    base = upscaling.base
    plan = upscaling.plan
    return UpscaleRecord(
        method=method.name,
        new_layers=tuple(plan.new_indices),
        new_memories=tuple(plan.new_memories),
        trainable=method.trainable,
        causal=are_causal(upscaling.layout.memories),
        plan=tuple(plan.to_list()),
        options=for_record(method.options_record),
        seed=upscaling.request.seed,
        base_dtype=TORCH_NAMES[base.dtype],
        base_config=base.config,
        larger_base_config=base.composite.config if base.composite else None,
        base_sha256=base_sha256,
        zero_gains=_zero_gains(upscaling),
    )


def _zero_gains(upscaling: Upscaling) -> dict[str, float]:
    """Return gains that start at zero with the root mean square of the base's gains next to them."""
    import torch

    scales = {}
    for name, source in upscaling.surgery.zero_gains.items():
        _, index, own = name.split(".", 2)
        offset = upscaling.layout.backbone_layers[int(index)][own].offset or 0.0
        gains = read_tensor(upscaling.base.tensors[source], torch.float32) + offset
        scales[name] = float(f"{gains.pow(2).mean().sqrt().item():.4g}")
    return scales


def full_record(
    upscaling: Upscaling, done: Done, record: UpscaleRecord, changed: dict[str, Any], digests: dict[str, str]
) -> dict[str, Any]:
    """Return the content of `upscale.json`.

    Args:
        upscaling: What was decided.
        done: What became of it.
        record: The record in the config of the result.
        changed: What was changed in the tokenizer's files.
        digests: SHA-256 of the base's tensors by name.
    """
    method, source = upscaling.method, upscaling.source
    return {
        "midus_hf": __version__,
        **record.to_dict(),
        **changed,
        "dtype": upscaling.request.dtype,
        "base": base_record(upscaling.base, source.label, source.revision, digests),
        "parameters": vars(upscaling.counts),
        "identity": vars(done.identity),
        "promises_identity": method.identity,
        "kl_divergence": done.kl_divergence,
        "measurements": done.measurements,
        "paper": method.paper and method.paper.to_dict(),
    }


def base_record(base: BaseCheckpoint, name: str, revision: str | None, digests: dict[str, str]) -> dict[str, Any]:
    """Return the record of the base: its name, digests of its weights, and layout of its files."""
    files: dict[str, list[tuple[int, str]]] = {}
    for tensor_name, tensor in base.tensors.items():
        assert tensor.file is not None
        files.setdefault(tensor.file.name, []).append((tensor.start, tensor_name))
    return {
        "name": name,
        "revision": revision,
        "dtype": base.dtype,
        "tensor_sha256": digests,
        "files": {file: [tensor_name for _, tensor_name in sorted(names)] for file, names in sorted(files.items())},
    }


def write_record(folder: Path, record: dict[str, Any]) -> None:
    write_text(folder / RECORD_FILE, json.dumps(record, indent=2) + "\n")


def read_record(folder: Path) -> dict[str, Any] | None:
    """Read `upscale.json`; None if it is missing or not an object; invalid JSON is refused."""
    path = folder / RECORD_FILE
    if not path.is_file():
        return None
    try:
        record = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RequestError(f"{path} is not JSON ({error}). Delete it to use only config.json.") from None
    return record if isinstance(record, dict) else None


def read_upscaled(config: Config, folder: Path) -> UpscaleRecord:
    """Return the record that `upscale` wrote into a config, or raise `RequestError`."""
    record = record_of(config) if has_record(config) else None
    if record is None:
        raise RequestError(
            f"{folder} was not made by upscale: its config.json has no {RECORD_KEY!r} entry. Give an upscaled model."
        )
    if "new_rows" in record.others:
        raise RequestError(
            f"{folder} was made with the method {record.method!r}, which this version lacks; transformers loads the model without "
            "midus-hf. To strip or inspect it, install commit 826ade84 of midus-hf."
        )
    return record


def read_plan(record: UpscaleRecord, model: BaseCheckpoint) -> Plan:
    """Return the plan in a config's record; refuse a malformed one, or one of another model."""
    try:
        plan = Plan.from_list([*record.plan], record.base_config["num_hidden_layers"], record.new_memories)
        is_sound = (
            0 < plan.num_base_layers <= MOST_LAYERS
            and plan.num_layers == model.num_layers
            and sorted(plan.kept_indices) == list(range(plan.num_base_layers))
            and all(layer in range(plan.num_base_layers) for layer in plan.sources)
            and model.layout.memories.attached.keys() >= {*record.new_memories}
        )
    except (TypeError, KeyError, IndexError, AttributeError):
        is_sound = False
    if not is_sound:
        raise RequestError(
            f"config.json has a plan or new_memories (in upscale) that are not those of a model of {model.num_layers} "
            "layers; expected what upscale wrote. Restore the config that it wrote."
        )
    return plan


@dataclass(frozen=True)
class UpscaleReport:
    """Report of an upscaling; `to_dict` returns what `--json` prints, without the five before `training`.

    Args:
        method: Name of the method.
        base: The base as given in the request.
        output: The output folder; None for a dry run without one.
        model_type: Model type of the upscaled model.
        num_layers: L + K, its number of layers.
        new_layer_indices: Indices of its new layers.
        parameters: Parameter counts of base and result.
        bytes: Bytes read and written; of a dry run, 0 and the size of the output.
        identity: Result of the check against the base.
        seconds: Wall time without the start of the program.
        peak_rss_bytes: Largest resident memory of the process.
        promises_identity: Whether the method, with its options, promises that the result computes what the base computes.
        identity_except: Exceptions to that, a noun phrase; None if there are none.
        kl_divergence: From the base's next-token distribution to the result's, mean over tokens, in nats; None if not compared.
        measurements: Measurements of solvers for each tensor they made.
        renumbers_layers: Whether layers of the base have other indices in the upscaled model.
        training: What training takes, computed, of a dry run; None otherwise, and if there is nothing to train.
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
    measurements: Sequence[Measurement]
    renumbers_layers: bool
    training: dict[str, int] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the report as `--json` prints it; `upscale.json` holds the other fields too."""
        values = dataclasses.asdict(self)
        values["parameters"] = {name: count for name, count in values["parameters"].items() if count is not None}
        if self.training is None:
            del values["training"]
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

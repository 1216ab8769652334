"""Provenance: the record of what was done to a checkpoint, in its config and in `upscale.json`."""

import json
from pathlib import Path
from typing import Any

from midus_hf.anatomy.record import RECORD_KEY, UpscaleRecord, has_record, language_entry, record_of
from midus_hf.config.errors import RequestError
from midus_hf.files.checkpoint_files import RECORD_FILE
from midus_hf.files.json_text import parse_json
from midus_hf.files.outputs import write_text
from midus_hf.files.secrets import for_record
from upscalers.architecture.layer_tensors import Config
from upscalers.checkpoint.base_checkpoint import MOST_LAYERS, BaseCheckpoint
from upscalers.checkpoint.safetensors_format import TORCH_NAMES
from upscalers.methods.contract import Method
from upscalers.plan.plan import Plan

EDITS_KEY = "edits"


def upscale_record(method: Method, base: BaseCheckpoint, plan: Plan, seed: int, reads_ahead: bool) -> UpscaleRecord:
    """Return the record for an upscaled config, from which training knows what to train and `strip` restores the base."""
    return UpscaleRecord(
        method=method.name,
        new_layers=tuple(plan.new_indices),
        new_memories=tuple(plan.new_memories),
        trainable=method.trainable,
        causal=not reads_ahead,
        plan=tuple(plan.to_list()),
        options=for_record(method.recorded_options),
        seed=seed,
        base_dtype=TORCH_NAMES[base.dtype],
        base_config=base.config,
        larger_base_config=base.composite.config if base.composite else None,
        **method.recorded(base, plan),
    )


def resized_vocabulary(config: Config) -> tuple[int, int] | None:
    """Return the sizes of the base's and the model's vocabulary if it was resized since; None if not, or without a record."""
    record = record_of(config) if has_record(config) else None
    if record is None:
        return None
    before, size = record.base_config.get("vocab_size"), language_entry(config).get("vocab_size")
    return None if before is None or size is None or before == size else (before, size)


def paper_entry(method: Method | type[Method]) -> dict[str, str] | None:
    """Return title and reference of a method's paper; None if it has none."""
    return None if method.paper is None else {"title": method.paper.title, "reference": method.paper.reference}


def base_record(base: BaseCheckpoint, name: str, revision: str | None, digests: dict[str, str]) -> dict[str, Any]:
    """Return the record of the base: its name, the digest of each of its weights, and the layout of its files."""
    files: dict[str, list[tuple[int, str]]] = {}
    stored = {name: tensor.in_file for name, tensor in base.tensors.items() if name not in base.packed}
    for tensor_name, tensor in stored.items():
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
    """Write `upscale.json`, whole or not at all."""
    write_text(folder / RECORD_FILE, json.dumps(record, indent=2) + "\n")


def read_record(folder: Path) -> dict[str, Any] | None:
    """Read `upscale.json`; None if it is missing, as where only a model was saved, or not an object. Invalid JSON is refused."""
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
    """Return the plan in a config's record; one that is malformed or belongs to another model is refused."""
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

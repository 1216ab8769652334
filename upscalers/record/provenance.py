"""Provenance: the record of what was done to a checkpoint, in its config and in `upscale.json`."""

import json
from pathlib import Path
from typing import Any

from midus_hf.files.checkpoint_files import RECORD_FILE
from midus_hf.files.json_text import parse_json
from midus_hf.files.outputs import CONFIG_KEY, LANGUAGE_KEY, NEW_ROWS, has_config_entry, language_entry
from midus_hf.files.secrets import for_record
from midus_hf.memories.entries import BASE_DIGEST
from upscalers.architecture.family import Config
from upscalers.checkpoint.base_checkpoint import MOST_LAYERS, BaseCheckpoint
from upscalers.checkpoint.safetensors_format import TORCH_NAMES
from upscalers.checkpoint.tokenizer import FIRST_TOKEN_KEY
from upscalers.methods.contract import Method
from upscalers.plan.plan import Plan

DIGEST_KEY = BASE_DIGEST
# Entry with the `config.json` of the composite model that contains the base; `base_config` then is that of the base itself.
COMPOSITE_KEY = "larger_base_config"
EDITS_KEY = "edits"


def config_entry(method: Method, base: BaseCheckpoint, plan: Plan, seed: int, reads_ahead: bool) -> Config:
    """Return the config entry of an upscaled model, from which training knows what to train and `strip` restores the base."""
    return {
        "method": method.name,
        "new_layers": plan.new_indices,
        **({"new_memories": list(plan.new_memories)} if plan.new_memories else {}),
        **({NEW_ROWS: [plan.new_rows.start, plan.new_rows.stop]} if plan.new_rows else {}),
        **method.recorded(base, plan),
        "trainable": method.trainable,
        **({"causal": False} if reads_ahead else {}),
        "plan": plan.to_list(),
        "options": for_record(method.recorded_options),
        "seed": seed,
        "base_dtype": TORCH_NAMES[base.dtype],
        "base_config": base.config,
        **({COMPOSITE_KEY: base.composite.config} if base.composite else {}),
    }


def whole_base_config(entry: Config) -> Config:
    """Return the content of the base's `config.json`, from the entry that `upscale` wrote into the config of the result."""
    base, composite = entry["base_config"], entry.get(COMPOSITE_KEY)
    if composite is None:
        return dict(base)
    upscaling_keys = {key: base[key] for key in ("memory", CONFIG_KEY) if key in base}  # edits change these
    return {**composite, LANGUAGE_KEY: {**composite[LANGUAGE_KEY], **upscaling_keys}}


def resized_vocabulary(config: Config) -> tuple[int, int] | None:
    """Return the sizes of the base's and the model's vocabulary if it was resized since; None if not."""
    language = language_entry(config)
    base = language[CONFIG_KEY].get("base_config")  # `read_plan` refuses one that is malformed
    before, size = base.get("vocab_size") if isinstance(base, dict) else None, language.get("vocab_size")
    if language[CONFIG_KEY].get(NEW_ROWS):
        return None  # behind the base's rows, which are told apart
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
    """Write `upscale.json`."""
    (folder / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def read_record(folder: Path) -> dict[str, Any] | None:
    """Read `upscale.json`; None if it is missing, as after further training, or not an object. Invalid JSON is refused."""
    path = folder / RECORD_FILE
    if not path.is_file():
        return None
    try:
        record = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}). Delete it to use only config.json.") from None
    return record if isinstance(record, dict) else None


def read_config_entry(config: Config, folder: Path) -> Config:
    """Return the entry that `upscale` wrote into a config, or raise `ValueError`."""
    if not has_config_entry(config):
        raise ValueError(
            f"{folder} was not made by upscale: its config.json has no {CONFIG_KEY!r} entry. Give an upscaled model."
        )
    entry: Config = language_entry(config)[CONFIG_KEY]
    return entry


def read_plan(entry: Config, model: BaseCheckpoint) -> Plan:
    """Return the plan in a config's entry; one that is malformed or belongs to another model is refused."""
    try:
        memories = tuple(entry.get("new_memories", ()))
        rows = range(*entry.get(NEW_ROWS, (0,)))
        first = entry.get(FIRST_TOKEN_KEY, rows.start)
        plan = Plan.from_list(entry["plan"], entry["base_config"]["num_hidden_layers"], memories, rows)
        is_sound = (
            0 < plan.num_base_layers <= MOST_LAYERS
            and plan.num_layers == model.num_layers
            and sorted(plan.kept_indices) == list(range(plan.num_base_layers))
            and all(layer in range(plan.num_base_layers) for layer in plan.sources)
            and model.layout.memories.attached.keys() >= {*memories}
            and (not rows or (0 < first <= min(rows.start, entry["base_config"]["vocab_size"]) and rows.step == 1))
        )
    except (TypeError, KeyError, IndexError, AttributeError):
        is_sound = False
    if not is_sound:
        raise ValueError(
            f"config.json has a plan, new_memories or new_rows (in upscale) that are not those of a model of {model.num_layers} "
            "layers; expected what upscale wrote. Restore the config that it wrote."
        )
    return plan

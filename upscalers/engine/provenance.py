"""Provenance: what was done to a checkpoint, in its config and in `upscale.json`."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from upscalers.engine.base_model import BaseModel
from upscalers.engine.errors import RequestError
from upscalers.engine.families import Config
from upscalers.engine.method import Method
from upscalers.engine.plan import Plan

RECORD_FILE = "upscale.json"
CONFIG_KEY = "upscale"


def config_entry(method: Method, base: BaseModel, plan: Plan, seed: int) -> Config:
    """What the config of an upscaled model remembers: enough to train the right layers and to strip them again.

    It stays with the model when it is saved after training, which `upscale.json` does not.
    """
    return {
        "method": method.name,
        "new_layers": plan.new_indices,
        "trainable": method.trainable,
        "plan": plan.to_list(),
        "options": dataclasses.asdict(method.options),
        "seed": seed,
        "base_config": base.config,
    }


def base_record(base: BaseModel, name: str, revision: str | None) -> dict[str, Any]:
    """What identifies the base, and how its files were laid out."""
    files: dict[str, list[tuple[int, str]]] = {}
    digest = hashlib.sha256()
    for tensor_name, tensor in base.tensors.items():
        assert tensor.file is not None
        files.setdefault(tensor.file.name, []).append((tensor.start, tensor_name))
        digest.update(f"{tensor.file.name}:{tensor_name}:{tensor.dtype}:{tensor.shape}:{tensor.start}\n".encode())
    return {
        "name": name,
        "revision": revision,
        "dtype": base.dtype,
        "layout_sha256": digest.hexdigest(),
        "files": {file: [tensor_name for _, tensor_name in sorted(names)] for file, names in sorted(files.items())},
    }


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write `upscale.json`."""
    (folder / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def read_record(folder: Path) -> dict[str, Any] | None:
    """Read `upscale.json`; None where it is gone, as after further training."""
    path = folder / RECORD_FILE
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RequestError(f"{path} is not JSON ({error}). Delete it to go by config.json alone.") from None
    return record if isinstance(record, dict) else None


def read_config_entry(config: Config, folder: Path) -> Config:
    """The config's entry.

    Raises:
        RequestError: If the model was not made by `upscale`.
    """
    entry = config.get(CONFIG_KEY)
    needed = {"method", "plan", "base_config", "new_layers"}
    if not isinstance(entry, dict) or not needed <= entry.keys():
        raise RequestError(
            f"{folder} was not made by upscale: its config.json has no {CONFIG_KEY!r} entry. Give an upscaled model."
        )
    return entry

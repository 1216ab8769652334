"""Inspection of what was done to a checkpoint."""

import math
import re
from pathlib import Path
from typing import Any

from midus_hf.anatomy.record import UpscaleRecord, has_record
from midus_hf.files.checkpoint_files import (
    CODE,
    CONFIGS_WITH_CODE,
    CUSTOM_GENERATE,
    GLOSSARY_FILE,
    imported_code,
    named_classes,
)
from midus_hf.files.outputs import STRIPPED_KEY
from midus_hf.memories.bank import banks_of
from upscalers.checkpoint.base_checkpoint import open_base, read_config
from upscalers.checkpoint.source import fetch_code, resolve_source
from upscalers.record.provenance import EDITS_KEY, read_plan, read_record, read_upscaled

_OWN_CLASS = re.compile(rf"{Path(CODE[0]).stem}\.\w+")


def inspect_checkpoint(model: str | Path) -> dict[str, Any]:
    """Return provenance, plan and memory of a folder or hub id of `upscale` or `strip`; refuse others.

    Returns:
        `{"model", "method", "base", "options", "seed", "trainable", "causal", "model_type", "memory", "parameters", "new_memories",
        "layers", "measurements", "code"}`; with a glossary also `entries`, their number; after edits `edits`; where other code than
        `code` would run `other_code` (see `find_other_code`). `parameters` has `total` and `new`, and where texts fetch blocks
        `fetched` and `bank`; `layers` has `{"index", "new", "from", "parameters"}` per layer. A result of `strip` has `"stripped"`:
        `{"model", "method", "removed_layers", "base_confirmed", "differing_tensors"}`, and if it holds no earlier upscaling,
        otherwise only `{"model", "model_type", "num_layers", "parameters"}` and any `other_code`.
    """
    with resolve_source(str(model), config_only=True, needs=((GLOSSARY_FILE,),)) as source:
        config = read_config(source.folder)
        record = read_record(source.folder) or {}
        stripped = {STRIPPED_KEY: record[STRIPPED_KEY]} if isinstance(record.get(STRIPPED_KEY), dict) else {}
        is_plain = bool(stripped) and not has_record(config)
        upscaled = UpscaleRecord() if is_plain else read_upscaled(config, source.folder)
        opened = open_base(source.folder, needs_weights=False)
        counted = {name: tensor for name, tensor in opened.tensors.items() if name not in opened.uncounted_names}
        counts = {name: math.prod(tensor.shape) for name, tensor in counted.items()}
        described = {"model": str(model), "model_type": opened.config["model_type"]}
        fetch_code(source)
        other = find_other_code(source.folder)
        other_code = {"other_code": other} if other else {}
        if is_plain:
            total = {"total": sum(counts.values())}
            return {**described, "num_layers": opened.num_layers, "parameters": total, **other_code, **stripped}
        plan = read_plan(upscaled, opened)
        layers = [
            {
                "index": index,
                "new": index in plan.new_indices,
                "from": plan.describe(index, opened.layout.memories),
                "parameters": sum(counts.get(name, 0) for name in opened.layer_names[index].values()),
            }
            for index in range(plan.num_layers)
        ]
        base = record.get("base")
        unknown = f"unknown: {'strip does not restore the record of the base' if stripped else 'upscale.json is gone'}"
        banks = banks_of(opened.layout.memories).values()
        fetched, bank = sum(each.fetched for each in banks), sum(each.parameters for each in banks)
        return {
            "model": str(model),
            "method": upscaled.method,
            "base": base.get("name") if isinstance(base, dict) else unknown,
            "options": dict(upscaled.options),
            "seed": upscaled.seed,
            "trainable": upscaled.trainable,
            "causal": upscaled.causal,
            "model_type": opened.config["model_type"],
            "memory": opened.config.get("memory") or [],
            "parameters": {
                "total": sum(counts.values()),
                "new": sum(count for name, count in counts.items() if plan.owns(name)),
                **({"fetched": fetched, "bank": bank} if bank else {}),
            },
            "new_memories": list(plan.new_memories),
            **_count_entries(source.folder),
            "layers": layers,
            "measurements": record.get("measurements") or [],
            "code": inspect_code(source.folder),
            **other_code,
            **({EDITS_KEY: list(upscaled.edits)} if upscaled.edits else {}),
            **stripped,
        }


def _count_entries(folder: Path) -> dict[str, int]:
    if not (folder / GLOSSARY_FILE).is_file():
        return {}
    from midus_hf.memories.packs.glossary import read_glossary

    return {"entries": len(read_glossary(folder))}


def inspect_code(folder: Path) -> dict[str, Any] | None:
    """Return `{"file", "version", "as_generated"}` for the code in a checkpoint; None if there is none."""
    path = folder / CODE[0]
    if not path.is_file():
        return None
    from transformers import AutoConfig

    import midus_hf  # noqa: F401 - registers the classes
    from midus_hf.carried.module import carried_module

    text = path.read_text(encoding="utf-8", errors="replace")
    header = re.search(r"^midus-hf (\S+) wrote this module", text, flags=re.MULTILINE)
    generated = carried_module(AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
    return {"file": path.name, "version": header and header.group(1), "as_generated": text == generated}


def find_other_code(folder: Path) -> list[dict[str, Any]]:
    """Return what lets `trust_remote_code=True` run code other than `CODE`, which `inspect_code` judges.

    Returns:
        `{"file", "name", "modules"}` for each name: the file that names it, the name as it stands there, and the files of the
        folder that would run, those that it imports from the folder included. `name` is None for code that runs unnamed.
    """
    found: list[dict[str, Any]] = []
    for path in sorted(file for pattern in CONFIGS_WITH_CODE for file in folder.glob(pattern)):
        for name in dict.fromkeys(named_classes(path)):
            if not _OWN_CLASS.fullmatch(name):
                modules = [file.name for file in imported_code(folder, [name.partition(".")[0]])]
                found.append({"file": path.name, "name": name, "modules": modules})
    if (folder / CUSTOM_GENERATE).is_file():
        found.append({"file": CUSTOM_GENERATE, "name": None, "modules": [CUSTOM_GENERATE]})
    return found

"""Telling what was done to a checkpoint."""

import math
from pathlib import Path
from typing import Any

from upscalers.engine.base_model import open_base, read_config
from upscalers.engine.provenance import read_config_entry, read_plan, read_record
from upscalers.engine.source import resolve_source


def inspect_checkpoint(model: str | Path) -> dict[str, Any]:
    """Read provenance, plan and memory of an upscaled checkpoint.

    Args:
        model: A folder or hub id; its `config.json` is enough.

    Returns:
        `{"model", "method", "base", "options", "seed", "trainable", "model_type", "memory", "parameters", "layers",
        "measurements"}`, `layers` with `{"index", "new", "from", "parameters"}` a layer.

    Raises:
        RequestError: If the model was not made by `upscale`.
    """
    with resolve_source(str(model), config_only=True) as source:
        entry = read_config_entry(read_config(source.folder), source.folder)
        opened = open_base(source.folder, needs_weights=False)
        record = read_record(source.folder) or {}
        plan = read_plan(entry, opened)
        uncounted = opened.uncounted_names()
        layers = [
            {
                "index": index,
                "new": index in plan.new_indices,
                "from": plan.describe(index),
                "parameters": sum(
                    math.prod(opened.tensors[name].shape)
                    for name in opened.layer_names(index).values()
                    if name not in uncounted
                ),
            }
            for index in range(plan.num_layers)
        ]
        base = record.get("base")
        total = sum(math.prod(tensor.shape) for name, tensor in opened.tensors.items() if name not in uncounted)
        return {
            "model": str(model),
            "method": entry["method"],
            "base": base.get("name") if isinstance(base, dict) else "unknown: upscale.json is gone",
            "options": entry.get("options") or {},
            "seed": entry.get("seed"),
            "trainable": entry.get("trainable"),
            "model_type": opened.config["model_type"],
            "memory": opened.config.get("memory") or [],
            "parameters": {"total": total, "new": sum(layer["parameters"] for layer in layers if layer["new"])},
            "layers": layers,
            "measurements": record.get("measurements") or [],
        }

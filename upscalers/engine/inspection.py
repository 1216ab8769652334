"""Telling what was done to a checkpoint."""

import math
from pathlib import Path
from typing import Any

from upscalers.engine.base_model import open_base, read_config
from upscalers.engine.errors import RequestError
from upscalers.engine.provenance import read_config_entry, read_record
from upscalers.engine.source import resolve_source


def inspect_checkpoint(model: str | Path) -> dict[str, Any]:
    """Read provenance, plan and memory of an upscaled checkpoint.

    Args:
        model: A folder or hub id; its `config.json` is enough.

    Returns:
        `{"model", "method", "base", "options", "seed", "trainable", "model_type", "memory", "parameters", "layers"}`,
        `layers` with `{"index", "new", "from", "parameters"}` a layer.

    Raises:
        RequestError: If the model was not made by `upscale`.
    """
    with resolve_source(str(model)) as source:
        entry = read_config_entry(read_config(source.folder), source.folder)
        opened = open_base(source.folder, needs_weights=False)
        record = read_record(source.folder) or {}
        if len(entry["plan"]) != opened.num_layers:
            raise RequestError(
                f"the plan in config.json has {len(entry['plan'])} layers, the model {opened.num_layers}; expected a plan "
                "of this model. Restore the config that upscale wrote."
            )
        new_layers = set(entry["new_layers"])
        layers = [
            {
                "index": index,
                "new": index in new_layers,
                "from": _origin(origin),
                "parameters": sum(
                    math.prod(opened.tensors[name].shape) for name in opened.layer_names(index).values()
                ),
            }
            for index, origin in enumerate(entry["plan"])
        ]
        total = sum(math.prod(tensor.shape) for tensor in opened.tensors.values())
        return {
            "model": str(model),
            "method": entry["method"],
            "base": (record.get("base") or {}).get("name", "unknown: upscale.json is gone"),
            "options": entry.get("options") or {},
            "seed": entry.get("seed"),
            "trainable": entry.get("trainable"),
            "model_type": opened.config["model_type"],
            "memory": opened.config.get("memory") or [],
            "parameters": {"total": total, "new": sum(layer["parameters"] for layer in layers if layer["new"])},
            "layers": layers,
        }


def _origin(layer: dict[str, Any]) -> str:
    if "base" in layer:
        return f"base {layer['base']}"
    neighbours = [f"base {layer[side]}" for side in ("previous", "next") if layer.get(side) is not None]
    return f"new, between {' and '.join(neighbours)}" if len(neighbours) == 2 else f"new, beside {neighbours[0]}"

"""Config of the upscaled model: all per-layer values follow the plan."""

import copy
from typing import Any

from midus_hf.config.errors import RequestError
from midus_hf.memories.bank import banks_of
from midus_hf.memories.registry import MemoryEntry
from upscalers.architecture.layer_tensors import (
    LAYER_INDEX_KEYS,
    LEADING_LAYERS_KEYS,
    NOT_PER_LAYER_KEYS,
    PER_LAYER_KEYS,
    PER_LAYER_MAPPING_KEYS,
    Config,
    Layout,
    check_list,
)
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint
from upscalers.plan.plan import Base, Plan


def follow_plan(base: BaseCheckpoint, plan: Plan) -> Config:
    """Return the base's config with `num_hidden_layers` and all per-layer values of the plan's layers."""
    config = copy.deepcopy(base.config)
    unchanged = plan.sources == list(range(base.num_layers))
    config |= copy.deepcopy(base.layout.per_layer_values)
    followed = config if unchanged else _followed_values(config, plan)
    for values, entry in zip(followed.get("memory") or [], base.layout.memories.entries, strict=True):
        values |= _followed_layers(base, plan, entry)
    followed["num_hidden_layers"] = plan.num_layers
    return followed


def pattern_concern(base: BaseCheckpoint, new: Layout, config: Config) -> str | None:
    """Return a warning if runtimes that derive attention types from the index would misread the result."""
    if config["model_type"] != base.family.model_type or base.layout.layer_types != base.layout.implied_types:
        return None
    listed, implied = new.layer_types or (), new.implied_types or ()
    num_moved = sum(one != other for one, other in zip(listed, implied, strict=True))
    if not num_moved:
        return None
    return (
        f"{num_moved} of {len(listed)} layers have another attention type than {base.family.model_type} implies by their "
        "index. transformers reads layer_types and is right; runtimes that use the index, such as llama.cpp, compute a different "
        "function. Write the types into their file (see docs/export.md)."
    )


def _followed_layers(base: BaseCheckpoint, plan: Plan, entry: MemoryEntry) -> dict[str, list[int]]:
    taken = [
        (index, layer.index)
        for index, layer in enumerate(plan.layers)
        if isinstance(layer, Base) and layer.index in entry.layers
    ]
    if [layer for _, layer in taken] != list(entry.layers) and entry.is_attached:
        memories = base.layout.memories
        if entry.into or memories.tables(entry.name) or entry.options.attends or entry.name in banks_of(memories):
            raise RequestError(
                f"memory {entry.name!r} ties layers {', '.join(map(str, entry.layers))} together, and the plan repeats "
                "some of them; expected each once. Choose a method that inserts layers."
            )
    for layer in entry.into:
        if sum(isinstance(planned, Base) and planned.index == layer for planned in plan.layers) != 1:
            raise RequestError(
                f"memory {entry.name!r} adds after layer {layer}, which the plan repeats; expected it once. Choose a "
                "method that inserts layers."
            )
    into = dict(zip(entry.layers, entry.into, strict=False))
    followed = {"layers": [index for index, _ in taken]}
    return {**followed, "into": [plan.kept_indices[into[layer]] for _, layer in taken]} if into else followed


def _followed_values(config: Config, plan: Plan) -> Config:
    sources, num_layers = plan.sources, plan.num_base_layers

    def followed(key: str, value: Any, path: str) -> Any:
        if key in NOT_PER_LAYER_KEYS:
            return value
        if key in PER_LAYER_MAPPING_KEYS and isinstance(value, dict):
            own = {int(index): values for index, values in value.items()}  # "05" where there are ten layers or more
            return {str(index): own[source] for index, source in enumerate(sources) if source in own}
        if key in LEADING_LAYERS_KEYS and type(value) is int:
            number = value + LEADING_LAYERS_KEYS[key]
            leading = [source < number for source in sources]
            # Other numbers do not describe layers; layers that differ from the plan are refused later.
            leads_the_plan = leading == sorted(leading, reverse=True)
            return sum(leading) - LEADING_LAYERS_KEYS[key] if leads_the_plan else value
        if isinstance(value, dict):
            if key != "text_config" and "model_type" in value:  # config of another model, such as an audio encoder
                return value
            if value and all(str(index).isdecimal() and int(index) < num_layers for index in value):
                raise _undeclared_error(path, f"a mapping by numbers below that of the layers ({num_layers})")
            return {inner: followed(inner, each, f"{path}.{inner}") for inner, each in value.items()}
        if not isinstance(value, list):
            return value
        check_list(key, value, num_layers, path)
        if key in PER_LAYER_KEYS:
            return [value[source] for source in sources]
        if key in LAYER_INDEX_KEYS:
            return [index for index, source in enumerate(sources) if source in value]
        if len(value) == num_layers:
            raise _undeclared_error(path, f"a list as long as the model has layers ({num_layers})")
        return [followed("", entry, f"{path}[{number}]") for number, entry in enumerate(value)]

    return {key: followed(key, value, key) for key, value in config.items()}


def _undeclared_error(path: str, description: str) -> RequestError:
    return RequestError(
        f"config.json has {path}, {description}; expected one whose meaning is known. Declare it in "
        "upscalers/architecture/layer_tensors.py."
    )

"""The config of the upscaled model: what it says of each layer follows the plan."""

import copy
from typing import Any

from upscalers.engine.base_model import BaseModel
from upscalers.engine.errors import RequestError
from upscalers.engine.families import Config
from upscalers.engine.plan import Base, Plan

PER_LAYER_KEYS = frozenset({"layer_types", "mlp_layer_types", "no_rope_layers"})
"""Lists with one entry a layer: they follow the plan."""

LAYER_INDEX_KEYS = frozenset({"mlp_only_layers", "moe_layers", "full_attn_idxs"})
"""Lists of layer indices: they are translated."""

NOT_PER_LAYER_KEYS = frozenset(
    {"architectures", "bos_token_id", "eos_token_id", "pad_token_id", "memory", "bad_words_ids", "suppress_tokens"}
)
"""Lists that have nothing to do with layers, whatever their length."""


def follow_plan(base: BaseModel, plan: Plan) -> Config:
    """The raw config of the base with everything that it says of single layers carried to the new layers.

    Args:
        base: The base.
        plan: The plan. A new layer shares the type of the layer whose attention it takes.

    Returns:
        A new config with `num_hidden_layers` and every per-layer list brought up to date. Types that the base leaves
        implied are written out, since what its family would imply from the index is wrong after an insertion.

    Raises:
        RequestError: If the config has a list as long as the model has layers and nobody said what it means.
    """
    config = copy.deepcopy(base.config)
    unknown = [
        key
        for key, value in config.items()
        if isinstance(value, list)
        and len(value) == base.num_layers
        and key not in PER_LAYER_KEYS | LAYER_INDEX_KEYS | NOT_PER_LAYER_KEYS
    ]
    if unknown:
        raise RequestError(
            f"config.json has {unknown[0]}, a list as long as the model has layers ({base.num_layers}); expected a list "
            "whose meaning is known. Declare it in upscalers/engine/layer_config.py."
        )
    sources = plan.sources
    layer_types = base.family.resolved_layer_types(config)
    if layer_types is not None:
        config["layer_types"] = _checked_length("layer_types", layer_types, base.num_layers)
    for key in PER_LAYER_KEYS & config.keys():
        if isinstance(config[key], list):
            values = _checked_length(key, config[key], base.num_layers)
            config[key] = [values[source] for source in sources]
    for key in LAYER_INDEX_KEYS & config.keys():
        if isinstance(config[key], list):
            stray = [layer for layer in config[key] if type(layer) is not int or not 0 <= layer < base.num_layers]
            if stray:
                raise RequestError(
                    f"config.json lists {stray[0]!r} in {key}; expected layers from 0 to {base.num_layers - 1}. "
                    "Repair the base checkpoint."
                )
            config[key] = [index for index, source in enumerate(sources) if source in config[key]]
    for entry in config.get("memory") or []:
        entry["layers"] = sorted(
            index
            for index, layer in enumerate(plan.layers)
            if isinstance(layer, Base) and layer.index in entry["layers"]
        )
    config["num_hidden_layers"] = plan.num_layers
    return config


def _checked_length(key: str, values: list[Any], num_layers: int) -> list[Any]:
    if len(values) != num_layers:
        raise RequestError(
            f"config.json lists {len(values)} {key}; expected {num_layers}, one a layer. Repair the base checkpoint."
        )
    return values

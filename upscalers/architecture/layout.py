"""The layout of a model by its config: layers, tensors, roles and memories.

Main types follow from the table of types, without torch. Other types, and configs with keys or values that the table lacks, are read
from the model that transformers builds (`built_layout.py`): seconds, but no memory.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

from midus_hf.anatomy.record import record_of
from midus_hf.anatomy.types import MAIN_TYPES, MEMORY_PREFIX, model_type_of
from midus_hf.config.declared_tensors import DeclaredTensor, ModelSizes
from midus_hf.config.errors import RequestError
from midus_hf.memories.options import InsertedOptions
from midus_hf.memories.registry import ATTACHED, INSERTED, TABLES, read_memories, tensors_in_layer
from upscalers.architecture.layer_tensors import (
    GIVES_KEYS,
    LAYER_INDEX_KEYS,
    NOT_OF_BACKBONE,
    NOT_PER_LAYER_KEYS,
    PER_LAYER_KEYS,
    PER_LAYER_MAPPING_KEYS,
    SHARED_LAYERS_KEY,
    Config,
    LayerTensor,
    Layout,
    Settings,
    kept_roles,
)

_LAYERS = "model.layers."
# Sizes that a config must have, and others that must be positive if present.
_NEEDED = ("hidden_size", "num_attention_heads", "vocab_size")
_POSITIVE = ("num_key_value_heads", "head_dim")
_TYPES = "layer_types"
# Keys that change layers in ways that the row does not cover.
_UNUSUAL = (PER_LAYER_KEYS - {_TYPES}) | LAYER_INDEX_KEYS | PER_LAYER_MAPPING_KEYS | {SHARED_LAYERS_KEY}
_PERIOD_KEY = "sliding_window_pattern"
_PERIODS = {"gemma2": 2, "gemma3_text": 6}
# Keys that rotary embeddings of each type need, in a config of the family or, in Gemma 3, for each type of layers.
_ROPE_NEEDS: dict[Any, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "yarn": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
}
_NESTED_ROPE = {"full_attention", "sliding_attention"}
_ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
_DTYPES = (None, "float32", "float16", "bfloat16")


def layout_of(config: Config) -> Layout:
    """Return the layout of a model with its memories by its raw config; refuse wrong sizes and misfits."""
    native = {key: value for key, value in config.items() if key not in NOT_OF_BACKBONE}
    native["model_type"] = str(config["model_type"]).removeprefix(MEMORY_PREFIX)
    backbone = _backbone(json.dumps(native, sort_keys=True))
    if config.get("memory") in (None, []):
        return backbone
    record = record_of(config)
    memories = read_memories(config["memory"], backbone.sizes, None if record is None else record.base_sha256)
    declared = {
        f"model.{TABLES}.{memory}.{number}.{name}": tensor
        for memory in memories.attached
        for number, shared in enumerate(memories.tables(memory))
        for name, tensor in shared.tensors.items()
    }
    tables = {name: tensor.shape for name, tensor in declared.items()}
    layers = []
    inserted = memories.inserted
    for layer, tensors in enumerate(backbone.backbone_layers):
        if layer in inserted:
            options = inserted[layer].options
            assert isinstance(options, InsertedOptions)
            roles = kept_roles(options)
            tensors = {name: tensor for name, tensor in tensors.items() if tensor.role in roles}
        own: dict[str, DeclaredTensor] = {}
        for entry in memories.entries:
            if layer in entry.layers:
                within = f"{ATTACHED}.{entry.name}" if entry.is_attached else INSERTED
                of_entry = tensors_in_layer(entry, layer, backbone.sizes)
                own |= {f"{within}.{name}": tensor for name, tensor in of_entry.items()}
        declared |= {f"{_LAYERS}{layer}.{name}": tensor for name, tensor in own.items()}
        layers.append(tensors | {name: LayerTensor("memory", tensor.shape) for name, tensor in own.items()})
    return replace(
        backbone,
        memories=memories,
        layers=layers,
        outer=backbone.outer | tables,
        buffers=backbone.buffers | {name for name, tensor in declared.items() if tensor.role == "buffer"},
        integers={name: tensor.dtype for name, tensor in declared.items() if tensor.dtype},
    )


@cache
def _backbone(content: str) -> Layout:
    """Return the layout of a config without our memories, known or read from a built model."""
    native = json.loads(content)
    for key in (*_NEEDED, *_POSITIVE, "intermediate_size"):
        value = native.get(key)
        is_list = key == "intermediate_size" and isinstance(value, list) and value  # one per layer
        if (key in _NEEDED or value is not None) and not is_list and (type(value) is not int or value < 1):
            raise RequestError(
                f"config has {key} = {value!r}; expected a positive integer. Repair config.json of the base."
            )
    types = native.get("layer_types")
    known = ("full_attention", "sliding_attention")
    if types is not None and not (isinstance(types, list) and all(isinstance(each, str) for each in types)):
        raise RequestError(
            f"config.json has layer_types = {types!r}; expected a list of names, one per layer. Repair the base checkpoint."
        )
    unknown = next((each for each in types or () if each not in known), None)
    if native["model_type"] in MAIN_TYPES and unknown is not None:
        raise RequestError(
            f"config.json lists {unknown!r} in layer_types; expected {' or '.join(known)} in a {native['model_type']} model. "
            "Repair the base checkpoint."
        )
    described = known_layout(native)
    if described is None:
        from upscalers.architecture.built_layout import read_layout

        described = read_layout(native, model_type_of(native["model_type"]))
    return layout_from(native, **described)


def layout_from(native: Config, config: Any, layers: list[dict[str, LayerTensor]], **described: Any) -> Layout:
    """Return a layout from a resolved config, tensors of layers, and other fields of `Layout`."""
    values = vars(config)
    types = values.get("layer_types")
    num_shared = values.get(SHARED_LAYERS_KEY) or 0
    lists = {
        key: value
        for key, value in values.items()
        if isinstance(value, list)
        and key not in NOT_PER_LAYER_KEYS
        and (key in LAYER_INDEX_KEYS or len(value) == len(layers))
    }
    stated = {getattr(config, "attribute_map", {}).get(key, key) for key, value in native.items() if value is not None}
    kinds = [
        [str(value) if key == "layer_types" else f"{key} {value}" for value in values]
        for key, values in lists.items()
        if key in PER_LAYER_KEYS
    ]
    # The last layers may reuse keys and values of earlier ones of their type.
    types_or_blank = types or [""] * len(layers)
    first_shared = len(layers) - num_shared
    # Of the keys and values that later layers take.
    sources = (
        max((layer for layer in range(first_shared) if types_or_blank[layer] == each), default=first_shared)
        for each in {*types_or_blank[first_shared:]}
    )
    return Layout(
        sizes=ModelSizes.from_config(config),
        values=values,
        backbone_layers=layers,
        layers=layers,
        layer_types=types,
        per_layer_values={key: values for key, values in lists.items() if key not in stated},
        layer_kinds=[", ".join(values) for values in zip(*kinds, strict=True)] if kinds else None,
        norms_behind=all(
            norm in {tensor.role for tensor in of_layer.values()}
            and all(tensor.offset is not None for tensor in of_layer.values() if tensor.role == norm)
            for of_layer in layers
            for norm in ("attention_output_norm", "mlp_output_norm")
        ),
        num_leading_layers=min(sources, default=len(layers)),
        **described,
    )


def find_changed_setting(
    before: Sequence[Settings], after: Sequence[Settings], sources: Sequence[int], new_layers: Collection[int] = ()
) -> str | None:
    """Return which layer of a new model differs from its source in a setting, and which; None if none.

    A layer's index, the number of layers, and whether it gives keys and values to later layers may differ.
    """
    for index, source in enumerate(sources):
        for name in sorted(before[source].keys() | after[index].keys()):
            pair = before[source].get(name), after[index].get(name)
            if name.endswith(GIVES_KEYS) and index in new_layers and pair == (True, False):
                continue
            if pair[0] != pair[1] and pair not in ((source, index), (len(before), len(after))):
                return f"layer {index} has {name} = {pair[1]!r} and its source, layer {source}, has {pair[0]!r}"
    return None


def known_layout(native: Config) -> dict[str, Any] | None:
    """Return the arguments of `layout_from` from the table of types; None if transformers has to read it."""
    if native["model_type"] not in MAIN_TYPES:
        return None
    row = model_type_of(native["model_type"]).layout
    kinds = {key: types for key, (_, *types) in row["keys"].items()}
    values: Config = {**{key: default for key, (default, *_) in row["keys"].items()}, **native}
    if not _is_usual(native, values, kinds):
        return None
    for key, value in (
        ("head_dim", values["hidden_size"] // values["num_attention_heads"]),
        ("num_key_value_heads", values["num_attention_heads"]),
    ):
        if values.get(key) is None:
            values[key] = value
    num_layers = values["num_hidden_layers"]
    heads = values["num_attention_heads"]
    d = values["head_dim"]
    if d % 2 or heads % values["num_key_value_heads"]:
        return None
    sliding = None
    if "max_window_layers" in values and values["model_type"].startswith("qwen"):
        slides = values["use_sliding_window"] and values["sliding_window"] is not None
        sliding = [slides and layer >= values["max_window_layers"] for layer in range(num_layers)]
    elif (period := _PERIODS.get(values["model_type"])) is not None:
        if values["model_type"] == "gemma3_text":
            period = values.get(_PERIOD_KEY, period)
        sliding = [(layer + 1) % period > 0 for layer in range(num_layers)]
    implied = sliding and ["sliding_attention" if slides else "full_attention" for slides in sliding]
    if values.get(_TYPES) is None:
        values[_TYPES] = implied
    types = values[_TYPES]
    if types is not None and len(types) != num_layers:
        return None
    sizes = {**values, "queries": heads * d, "keys": values["num_key_value_heads"] * d}
    layer = {
        name: LayerTensor(role, tuple(sizes[each] for each in dimensions), offset)
        for name, (role, dimensions, offset, condition) in row["layer"].items()
        if condition is None or values[condition]
    }
    outer = {name: tuple(sizes[each] for each in dimensions) for name, dimensions in row["outer"].items()}
    tied = {name: outer.pop(name) for name in row["tied"] if values["tie_word_embeddings"]}
    return {
        "config": SimpleNamespace(**values),
        "layers": [layer] * num_layers,
        "implied_types": implied,
        "outer": outer,
        "tied": tied,
        # Nothing else changes what a layer computes.
        "settings": tuple({_TYPES: each} for each in types or [""] * num_layers),
        "expert_layers": frozenset(),
        "buffers": frozenset(),
        "is_converted": False,
    }


def _is_usual(native: Config, values: Config, kinds: dict[str, list[str]]) -> bool:
    """Return whether a config's values lie where known layouts hold, so that no model need be built."""
    num_layers = values["num_hidden_layers"]
    pad = values.get("pad_token_id")
    period = native.get(_PERIOD_KEY, 1)
    ropes = [native.get("rope_scaling"), native.get("rope_parameters")]
    if native["model_type"] == "gemma3_text" and isinstance(ropes[1], dict):
        if not ropes[1].keys() <= _NESTED_ROPE:
            return False
        ropes = [ropes[0], *ropes[1].values()]
    numbers = [native.get(key, 1) for key in ("rope_theta", "rope_local_base_freq", "partial_rotary_factor")]
    for rope in (rope for rope in ropes if rope is not None):
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else None
        if not isinstance(kind, str) or kind not in _ROPE_NEEDS or not _ROPE_NEEDS[kind] <= rope.keys():
            return False
        numbers += [value for key, value in rope.items() if key not in ("type", "rope_type")]
    return (
        _UNUSUAL.isdisjoint(native)
        and all(type(native[key]).__name__ in kinds[key] for key in native.keys() & kinds.keys())
        and all(native[key] is not None for key in native.keys() & {"head_dim", "tie_word_embeddings"} - kinds.keys())
        and not any(
            isinstance(value, list) and len(value) == num_layers
            for key, value in native.items()
            if key not in {_TYPES, *NOT_PER_LAYER_KEYS}
        )
        and values["hidden_size"] % values["num_attention_heads"] == 0
        and 0 <= values["initializer_range"] <= 1
        and not values.get("use_bidirectional_attention")
        and (pad is None or -1 <= pad < values["vocab_size"])
        and type(period) is int
        and period > 0
        and all(values[key] in _ACTIVATIONS for key in ("hidden_act", "hidden_activation") if key in kinds)
        and all(native.get(key) in _DTYPES for key in ("dtype", "torch_dtype"))
        and all(type(number) in (int, float) and number > 0 for number in numbers)
    )

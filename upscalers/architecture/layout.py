"""The layout of a model, which editing its tensors needs; for the main types it is written down (`written.py`).

Other layouts are read from the model that transformers builds from the config on the meta device, which imports torch and
transformers: this takes seconds, but no memory.
"""

import json
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midus_hf.anatomy.record import language_entry, record_of
from midus_hf.anatomy.types import MAIN_TYPES, MEMORY_PREFIX, ModelType, model_type_of
from midus_hf.config.declared_tensors import DeclaredTensor
from midus_hf.config.errors import RequestError
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.memories.entries import ATTACHED, INSERTED, TABLES, read_memories
from midus_hf.memories.options import InsertedOptions
from upscalers.architecture.layer_tensors import NOT_OF_BACKBONE, Config, LayerTensor, Layout, Settings, kept_roles
from upscalers.architecture.per_layer import PER_LAYER_KEYS, SHARED_LAYERS_KEY, check_lists, per_layer_lists
from upscalers.architecture.written import written_model
from upscalers.request.errors import one_line

if TYPE_CHECKING:
    from torch import nn

_LAYERS = "model.layers."
# Setting of attention that says whether later layers read its keys and values.
_GIVES_KEYS = "store_full_length_kv"
_PLAIN = (bool, int, float, str, type(None))
# Sizes that a config must have, and others that must be positive if present.
_NEEDED, _POSITIVE = ("hidden_size", "num_attention_heads", "vocab_size"), ("num_key_value_heads", "head_dim")


def layout_of(config: Config) -> Layout:
    """Return the layout of a model by its raw config, with its memories.

    Raises:
        RequestError: If a size is missing or wrong, if transformers cannot build the model, or if the `memory` list is malformed or
            does not fit the model.
    """
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
    layers, inserted = [], memories.inserted
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
                of_entry = entry.tensors_at(layer, backbone.sizes)
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


def model_on_meta(native: Config, classes: Mapping[Any, Any]) -> Any:
    """Return the model that transformers builds from a config, on the meta device.

    Args:
        native: Content of a `config.json`, of a type that transformers knows.
        classes: Class of the model by the class of its config.

    Raises:
        RequestError: If transformers cannot build the model.
    """
    import torch

    try:
        config = _resolved(native)
        with torch.device("meta"):
            return classes[type(config)](config)
    except Exception as error:  # config classes and models raise whatever their checks raise
        check_lists(language_entry(native))
        raise RequestError(
            f"transformers cannot build the model that config.json describes ({type(error).__name__}: {one_line(error)}). Repair "
            "config.json of the base."
        ) from None


def _resolved(native: Config) -> Any:
    """Return the config that transformers reads from a file with this content."""
    from transformers import CONFIG_MAPPING

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(native), encoding="utf-8")
        return CONFIG_MAPPING[native["model_type"]].from_pretrained(folder, local_files_only=True)


@cache
def _backbone(content: str) -> Layout:
    """Return the layout of a model without memories, by its config in JSON: stored, or else read from the built model."""
    native = json.loads(content)
    _check_values(native)
    written = written_model(native)
    return (
        layout_read(native, model_type_of(native["model_type"])) if written is None else _described(native, **written)
    )


def layout_read(native: Config, row: ModelType) -> Layout:
    """Return the layout of a model without memories, read from the model of a type that transformers builds from a config."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.core_model_loading import revert_weight_conversion

    from upscalers.architecture.layer_roles import read_roles

    model = model_on_meta(native, MODEL_FOR_CAUSAL_LM_MAPPING)
    config, modules = model.config, model.model.layers
    held = model.state_dict(keep_vars=True)
    names = {id(tensor): name for name, tensor in reversed(held.items())}
    tied = {name: tuple(tensor.shape) for name, tensor in held.items() if names[id(tensor)] != name}
    # Only tensors that a checkpoint holds.
    stored = revert_weight_conversion(model, {name: tensor for name, tensor in held.items() if name not in tied})
    parameters = revert_weight_conversion(
        model, {name: held[name] for name, _ in model.named_parameters() if name not in tied}
    )
    buffers = frozenset(stored.keys() - parameters.keys())
    roles = [read_roles(row, layer) for layer in modules]
    layers: list[dict[str, LayerTensor]] = [{} for _ in modules]
    for name, tensor in stored.items():
        if name.startswith(_LAYERS):
            number, _, within = name.removeprefix(_LAYERS).partition(".")
            of_layer = roles[int(number)]
            own = names.get(id(tensor), name).removeprefix(f"{_LAYERS}{number}.")  # before a conversion
            role = of_layer.role(own)
            layers[int(number)][within] = LayerTensor(
                "buffer" if role == "base" and name in buffers else role,
                tuple(tensor.shape),
                of_layer.offsets.get(own, 0.0),
                of_layer.parts.get(own.rpartition(".")[0]),
            )
    return _described(
        native,
        config,
        layers,
        implied_types=_implied_types(native, vars(config).get("layer_types")),
        outer={name: tuple(tensor.shape) for name, tensor in stored.items() if not name.startswith(_LAYERS)},
        tied=tied,
        settings=tuple(settings_of(layer, vars(config).get(SHARED_LAYERS_KEY) or 0) for layer in modules),
        expert_layers=frozenset(index for index, of_layer in enumerate(roles) if of_layer.has_experts),
        buffers=buffers,
        is_converted=stored.keys() != held.keys() - tied.keys(),
    )


def _described(native: Config, config: Any, layers: list[dict[str, LayerTensor]], **described: Any) -> Layout:
    """Return the layout of a model by its resolved config and the tensors of its layers; `described` has further values."""
    values = vars(config)
    types, num_shared = values.get("layer_types"), values.get(SHARED_LAYERS_KEY) or 0
    lists = per_layer_lists(values, len(layers))
    stated = {getattr(config, "attribute_map", {}).get(key, key) for key, value in native.items() if value is not None}
    kinds = [
        [str(value) if key == "layer_types" else f"{key} {value}" for value in values]
        for key, values in lists.items()
        if key in PER_LAYER_KEYS
    ]
    # The last layers may reuse keys and values of earlier ones of their type.
    types_or_blank, first_shared = types or [""] * len(layers), len(layers) - num_shared
    sources = (  # of the keys and values that later layers take
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


def _check_values(native: Config) -> None:
    """Refuse sizes that are not positive integers, and types of layers that are not a list of known names."""
    for key in (*_NEEDED, *_POSITIVE, "intermediate_size"):
        value = native.get(key)
        is_list = key == "intermediate_size" and isinstance(value, list) and value  # one per layer
        if (key in _NEEDED or value is not None) and not is_list and (type(value) is not int or value < 1):
            raise RequestError(
                f"config has {key} = {value!r}; expected a positive integer. Repair config.json of the base."
            )
    types = native.get("layer_types")
    if types is None:
        return
    if not isinstance(types, list) or not all(isinstance(each, str) for each in types):
        raise RequestError(
            f"config.json has layer_types = {types!r}; expected a list of names, one per layer. Repair the base checkpoint."
        )
    known = ("full_attention", "sliding_attention")
    unknown = next((each for each in types if each not in known), None)
    if native["model_type"] in MAIN_TYPES and unknown is not None:
        raise RequestError(
            f"config.json lists {unknown!r} in layer_types; expected {' or '.join(known)} in a {native['model_type']} model. "
            "Repair the base checkpoint."
        )


def _implied_types(native: Config, types: list[str] | None) -> list[str] | None:
    """Return the types that layers have if a config lists none; `types` has those of this config."""
    if native.get("layer_types") is None:
        return types
    unlisted = {key: value for key, value in native.items() if key != "layer_types"}
    try:
        implied: list[str] | None = vars(_resolved(unlisted)).get("layer_types")
    except Exception:  # config classes raise whatever their checks raise
        return None
    return implied


def settings_of(layer: "nn.Module", num_shared_layers: int = 0) -> Settings:
    """Return the settings of a layer and of the modules within: numbers, names and truth values, and lists of these.

    Args:
        layer: A layer of the model.
        num_shared_layers: Number of layers that reuse keys and values of earlier layers. If there are none, the marks of the layers
            that would be reused are ignored, which Transformers 5.24 sets all the same. Default: 0.
    """
    idle = () if num_shared_layers else (_GIVES_KEYS,)
    return {
        f"{path}.{name}" if path else name: value
        for path, module in layer.named_modules()
        for name, value in [("class", type(module).__name__), *vars(module).items()]
        if not name.startswith("_") and name not in ("training", *idle) and _is_plain(value)
    }


def change_of_settings(
    before: Sequence[Settings], after: Sequence[Settings], sources: Sequence[int], new_layers: Collection[int] = ()
) -> str | None:
    """Return which layer of a new model has another setting than its source, and what it is; None if none has.

    The index of a layer and the number of layers are expected to differ, and are not compared. A new layer need not give its keys
    and values to later layers as its source does.

    Args:
        before: Settings of each layer of the base.
        after: Settings of each layer of the new model.
        sources: Layer of the base that each layer of the new model is made from.
        new_layers: Indices of the new layers. Default: none.
    """
    for index, source in enumerate(sources):
        for name in sorted(before[source].keys() | after[index].keys()):
            pair = before[source].get(name), after[index].get(name)
            if name.endswith(_GIVES_KEYS) and index in new_layers and pair == (True, False):
                continue
            if pair[0] != pair[1] and pair not in ((source, index), (len(before), len(after))):
                return f"layer {index} has {name} = {pair[1]!r} and its source, layer {source}, has {pair[0]!r}"
    return None


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, list | tuple) else isinstance(value, _PLAIN)

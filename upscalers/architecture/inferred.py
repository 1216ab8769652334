"""Families that no table describes: what surgery needs is read from the model that transformers builds from the base's config.

Building it imports torch and transformers, which takes seconds, and takes no memory, since the model is built on the meta device.
"""

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midus_hf.config.model_sizes import ModelSizes
from midus_hf.files.outputs import language_entry
from upscalers.architecture.family import NOT_OF_BACKBONE, Config, Family, LayerTensor, Layout, Shape
from upscalers.architecture.per_layer import PER_LAYER_KEYS, SHARED_LAYERS_KEY, check_lists, per_layer_lists
from upscalers.request.errors import RequestError, one_line

if TYPE_CHECKING:
    from torch import nn

    from upscalers.architecture.layer_roles import LayerRoles

# Settings of a layer by the name of their module within the layer and their own.
Settings = dict[str, Any]
_PLAIN = (bool, int, float, str, type(None))
_LAYERS = "model.layers."


class InferredFamily(Family):
    """A family that is read from the model that transformers builds.

    A layer may be of another kind than its neighbours by its index alone, which no list in the config says.
    """

    def backbone(self, config: Config) -> Layout:
        native = {key: value for key, value in config.items() if key not in NOT_OF_BACKBONE}
        native["model_type"] = self.model_type
        return _built(json.dumps(native, sort_keys=True))

    def blocks_by_layer(self, outer: Iterable[str]) -> dict[str, int]:
        """Return which of the tensors outside the layers, by full name, hold one equal block for each layer, along which dimension.

        An example are embeddings per layer, which stand side by side as columns of one tensor.
        """
        return {name: dim for name, dim in _blocks_by_layer(self.model_type).items() if name in outer}

    def prove(self, site: str, memory_type: str) -> None:
        """Prove that a memory of a type is wired right at a site of the family's layers.

        Raises:
            RequestError: If the memory is not wired right, or the site cannot be proven.
        """
        from midus_hf.models.inference.proof import prove, wirings_of

        try:
            for wiring in wirings_of(site, memory_type):
                prove(self.model_type, wiring)
        except ValueError as error:
            raise RequestError(
                f"model_type {self.model_type!r} takes no memory of type {memory_type!r} at the site {site!r} (its proof on a tiny "
                f"model: {one_line(error).rstrip('.')})."
            ) from None


def inferred_family(model_type: str) -> InferredFamily:
    """Return the family of a type that transformers knows and no table describes.

    Raises:
        RequestError: If transformers does not know the type, or the type cannot host memory. The message says why.
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, __version__

    if model_type not in CONFIG_MAPPING or CONFIG_MAPPING[model_type] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise RequestError(
            f"model_type {model_type!r} is no causal language model of transformers {__version__}; expected one. Install a newer "
            "transformers if the model is newer. Do not rename the type: as another type the model may load and still be a different "
            "model."
        )
    from midus_hf.models.inference.architecture import architecture_of

    try:
        architecture = architecture_of(model_type)
    except ValueError as error:
        raise RequestError(f"model_type {model_type!r} is not supported: {one_line(error)}") from None
    class_name = architecture.causal_lm.__name__.removesuffix("ForCausalLM")
    return InferredFamily(model_type=model_type, class_name=class_name)


def model_on_meta(native: str, classes: Mapping[Any, Any]) -> Any:
    """Return the model that transformers builds from a config, on the meta device.

    Args:
        native: Content of a `config.json`, of a type that transformers knows.
        classes: Class of the model by the class of its config.

    Raises:
        RequestError: If transformers cannot build the model.
    """
    import torch
    from transformers import CONFIG_MAPPING

    try:
        with tempfile.TemporaryDirectory() as folder:  # so that transformers reads the config as from a file
            (Path(folder) / "config.json").write_text(native, encoding="utf-8")
            config_class = CONFIG_MAPPING[json.loads(native)["model_type"]]
            config = config_class.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            return classes[type(config)](config)
    except Exception as error:  # config classes and models raise whatever their checks raise
        check_lists(language_entry(json.loads(native)))
        raise RequestError(
            f"transformers cannot build the model that config.json describes ({type(error).__name__}: {one_line(error)}). Repair "
            "config.json of the base."
        ) from None


@cache
def _built(native: str) -> Layout:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.core_model_loading import revert_weight_conversion

    from midus_hf.models.inference.architecture import architecture_of
    from upscalers.architecture.layer_roles import read_roles

    model = model_on_meta(native, MODEL_FOR_CAUSAL_LM_MAPPING)
    config = model.config
    held = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(held.items())}
    tied = {name: tuple(tensor.shape) for name, tensor in held.items() if first[id(tensor)] != name}
    # Only tensors that a checkpoint holds.
    stored = revert_weight_conversion(model, {name: tensor for name, tensor in held.items() if name not in tied})
    own = dict(model.named_parameters())
    stored_parameters = revert_weight_conversion(model, {name: held[name] for name in own if name not in tied})
    tensors = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    buffers = frozenset(stored.keys() - stored_parameters.keys())
    held_names = {id(tensor): name for name, tensor in reversed(held.items())}
    names = {name: held_names.get(id(tensor), name) for name, tensor in stored.items()}
    parts = architecture_of(config.model_type).layers
    roles = [read_roles(config.model_type, layer, parts[type(layer)]) for layer in model.model.layers]
    layers = [_layer_tensors(index, layer, tensors, names, buffers) for index, layer in enumerate(roles)]
    lists = per_layer_lists(vars(config), config.num_hidden_layers)
    stated = {config.attribute_map.get(key, key) for key, value in json.loads(native).items() if value is not None}
    kinds = [
        [str(value) if key == "layer_types" else f"{key} {value}" for value in values]
        for key, values in lists.items()
        if key in PER_LAYER_KEYS
    ]
    num_shared = (
        vars(config).get(SHARED_LAYERS_KEY) or 0
    )  # last layers that take keys and values of earlier ones of their type
    types = vars(config).get("layer_types")
    types_or_blank, first_shared = types or [""] * len(layers), len(layers) - num_shared
    givers = (
        max((layer for layer in range(first_shared) if types_or_blank[layer] == each), default=first_shared)
        for each in {*types_or_blank[first_shared:]}
    )
    return Layout(
        sizes=ModelSizes.of(config),
        backbone_layers=layers,
        outer={name: shape for name, shape in tensors.items() if not name.startswith(_LAYERS)},
        tied=tied,
        layer_types=types,
        per_layer_values={key: values for key, values in lists.items() if key not in stated},
        layer_kinds=[", ".join(values) for values in zip(*kinds, strict=True)] if kinds else None,
        norms_behind=all(
            norm in {tensor.role for tensor in of_layer.values()}
            and all(tensor.offset is not None for tensor in of_layer.values() if tensor.role == norm)
            for of_layer in layers
            for norm in ("attention_output_norm", "mlp_output_norm")
        ),
        num_leading_layers=min(givers, default=len(layers)),
        expert_layers=frozenset(index for index, of_layer in enumerate(roles) if of_layer.has_experts),
        buffers=buffers,
        is_converted=stored.keys() != held.keys() - tied.keys(),
        settings=tuple(settings_of(layer, num_shared) for layer in model.model.layers),
    )


@cache
def _blocks_by_layer(model_type: str) -> dict[str, int]:
    """Return the tensors outside the layers that grow with the number of layers, each with the dimension that grows."""
    from midus_hf.models.inference.tiny import tiny_model

    few, more = (tiny_model(model_type, num_hidden_layers=number).state_dict() for number in (4, 5))
    return {
        name: dim
        for name, tensor in few.items()
        if not name.startswith(_LAYERS) and more[name].shape != tensor.shape
        for dim in range(tensor.dim())
        if more[name].shape == (*tensor.shape[:dim], tensor.shape[dim] // 4 * 5, *tensor.shape[dim + 1 :])
    }


def _layer_tensors(
    index: int, roles: "LayerRoles", tensors: dict[str, Shape], names: dict[str, str], buffers: frozenset[str]
) -> dict[str, LayerTensor]:
    """Return roles and shapes of a layer's stored tensors; `names` has the names of all stored tensors in the model."""
    prefix = f"{_LAYERS}{index}."
    layer = {}
    for stored, shape in tensors.items():
        if stored.startswith(prefix):
            name = names[stored].removeprefix(prefix)
            role = roles.role(name)
            layer[stored.removeprefix(prefix)] = LayerTensor(
                "buffer" if role == "base" and stored in buffers else role,
                shape,
                roles.offsets.get(name, 0.0),
                roles.parts.get(name),
            )
    return layer


def settings_of(layer: "nn.Module", num_shared_layers: int = 0) -> Settings:
    """Return the settings of a layer and of the modules within: numbers, names and truth values, and lists of these.

    Args:
        layer: A layer of the model.
        num_shared_layers: Number of layers that take keys and values of earlier layers. If there are none, which layers would give
            theirs is no setting: Transformers 5.24 marks layers as givers all the same. Default: 0.
    """
    idle = () if num_shared_layers else ("store_full_length_kv",)
    return {
        f"{path}.{name}" if path else name: value
        for path, module in layer.named_modules()
        for name, value in [("class", type(module).__name__), *vars(module).items()]
        if not name.startswith("_") and name not in ("training", *idle) and _is_plain(value)
    }


def change_of_settings(before: Sequence[Settings], after: Sequence[Settings], sources: Sequence[int]) -> str | None:
    """Return which layer of a new model has another setting than its source, and what it is; None if none has.

    The index of a layer and the number of layers, which differ by right, are not compared. `sources` has the layer that
    each layer of the new model is made from.
    """
    for index, source in enumerate(sources):
        for name in sorted(before[source].keys() | after[index].keys()):
            pair = before[source].get(name), after[index].get(name)
            if pair[0] != pair[1] and pair not in ((source, index), (len(before), len(after))):
                return f"layer {index} has {name} = {pair[1]!r} and its source, layer {source}, {pair[0]!r}"
    return None


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)

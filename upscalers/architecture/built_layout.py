"""The layout of a model, read from what transformers builds from its config on the meta device.

Projections are identified by names and shapes, norms around them by the row of the type. Whether a norm multiplies by its weight or
by 1 + weight is determined from its outputs.
"""

import copy
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.core_model_loading import revert_weight_conversion

from midus_hf.anatomy.record import language_entry
from midus_hf.anatomy.types import ModelType
from midus_hf.config.errors import RequestError
from midus_hf.memories.hosting.parts import (
    FEED_FORWARDS,
    KEY_NORMS,
    MIXERS,
    PROJECTIONS,
    STACKED,
    has_heads,
    stacked_rows,
)
from upscalers.architecture.layer_tensors import (
    GIVES_KEYS,
    SHARED_LAYERS_KEY,
    Config,
    LayerTensor,
    Settings,
    check_lists,
)
from upscalers.request import one_line

_LAYERS = "model.layers."
_PLAIN = (bool, int, float, str, type(None))
_PROJECTIONS = {name: role for role in ("query", "key", "value") for name in PROJECTIONS[role]}
_HEAD_NORMS = {
    **dict.fromkeys(("q_norm", "q_layernorm", "query_layernorm"), "query_norm"),
    **dict.fromkeys(KEY_NORMS, "key_norm"),
}
_NORMS = ("attention_norm", "attention_output_norm", "mlp_norm", "mlp_output_norm")
# Projections by which feed-forward networks write to the residual stream.
_DOWNS = frozenset({*PROJECTIONS["down"], "down_proj_bias"})
_NETWORKS = frozenset(FEED_FORWARDS)
# By name: modules that write per-layer embeddings to the residual stream, and the factor of a layer's output.
_OF_LAYERS = {
    "per_layer_projection": "per_layer_projection",
    "post_per_layer_input_norm": "per_layer_output_norm",
    "layer_scalar": "layer_scalar",
}
_SEED, _ROWS = 0, 4


def model_on_meta(native: Config, classes: Mapping[Any, Any]) -> Any:
    """Return a config's model of a known type on the meta device; `classes` are by classes of configs."""
    try:
        config = _resolve_config(native)
        with torch.device("meta"):
            return classes[type(config)](config)
    except Exception as error:  # config classes and models raise whatever their checks raise
        check_lists(language_entry(native))
        raise RequestError(
            f"transformers cannot build the model that config.json describes ({type(error).__name__}: {one_line(error)}). Repair "
            "config.json of the base."
        ) from None


def _resolve_config(native: Config) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(native), encoding="utf-8")
        return CONFIG_MAPPING[native["model_type"]].from_pretrained(folder, local_files_only=True)


def read_layout(native: Config, row: ModelType) -> dict[str, Any]:
    """Return the arguments of `layout_from` for the model that transformers builds from a config."""
    model = model_on_meta(native, MODEL_FOR_CAUSAL_LM_MAPPING)
    config = model.config
    modules = model.model.layers
    held = model.state_dict(keep_vars=True)
    names = {id(tensor): name for name, tensor in reversed(held.items())}
    tied = {name: tuple(tensor.shape) for name, tensor in held.items() if names[id(tensor)] != name}
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
    return {
        "config": config,
        "layers": layers,
        "implied_types": _implied_types(native, vars(config).get("layer_types")),
        "outer": {name: tuple(tensor.shape) for name, tensor in stored.items() if not name.startswith(_LAYERS)},
        "tied": tied,
        "settings": tuple(layer_settings(layer, vars(config).get(SHARED_LAYERS_KEY) or 0) for layer in modules),
        "expert_layers": frozenset(index for index, of_layer in enumerate(roles) if of_layer.has_experts),
        "buffers": buffers,
        "is_converted": stored.keys() != held.keys() - tied.keys(),
    }


def _implied_types(native: Config, types: list[str] | None) -> list[str] | None:
    if native.get("layer_types") is None:
        return types
    unlisted = {key: value for key, value in native.items() if key != "layer_types"}
    try:
        implied: list[str] | None = vars(_resolve_config(unlisted)).get("layer_types")
    except Exception:  # config classes raise whatever their checks raise
        return None
    return implied


def layer_settings(layer: nn.Module, num_shared_layers: int = 0) -> Settings:
    """Return the attributes of a layer's modules that are numbers, names, truth values or lists of these.

    Without layers (`num_shared_layers`) that reuse keys and values, marks of reused layers, which Transformers 5.24 sets, are
    ignored.
    """
    idle = () if num_shared_layers else (GIVES_KEYS,)
    return {
        f"{path}.{name}" if path else name: value
        for path, module in layer.named_modules()
        for name, value in [("class", type(module).__name__), *vars(module).items()]
        if not name.startswith("_") and name not in ("training", *idle) and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, list | tuple) else isinstance(value, _PLAIN)


@dataclass
class LayerRoles:
    """Purposes of a layer's modules, by names within it; offsets and parts are as in `LayerTensor`."""

    modules: dict[str, str]  # roles, also of the modules within, unless these have their own
    offsets: dict[str, float | None] = field(default_factory=dict)  # of weights of norms
    # of linear modules that stack projections
    parts: dict[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    has_experts: bool = False  # whether a feed-forward network is a mixture of experts

    def role(self, name: str) -> str:
        parts = name.split(".")
        if parts[0] in _NETWORKS and not _DOWNS.isdisjoint(parts):
            return "down"
        prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        return next((self.modules[prefix] for prefix in prefixes if prefix in self.modules), "base")


def read_roles(row: ModelType, layer: nn.Module) -> LayerRoles:
    """Return what the modules of a layer on the meta device do, of a model type."""
    parts = row.layers[type(layer).__name__]
    norms = {getattr(parts, role): role for role in _NORMS}
    roles = LayerRoles({**_OF_LAYERS, **{norm: role for norm, role in norms.items() if norm}})
    for names, read in ((MIXERS, _read_mixer), (FEED_FORWARDS, _read_network)):
        for name in names:
            module = getattr(layer, name, None)
            if isinstance(module, nn.Module):
                read(row, roles, name, module)
    for name, module in layer.named_modules():
        weight = getattr(module, "weight", None)
        if "Norm" in type(module).__name__ and isinstance(weight, nn.Parameter) and weight.dim() == 1:
            roles.offsets[f"{name}.weight"] = gain_offset(module)
    return roles


def gain_offset(norm: nn.Module) -> float | None:
    """Return what a norm adds to its weight before it multiplies: 0, 1, or None for neither kind."""
    tried: Any = copy.deepcopy(norm).to_empty(device="cpu").float()
    hidden = torch.randn((_ROWS, tried.weight.shape[0]), generator=torch.Generator().manual_seed(_SEED))
    for offset in (0.0, 1.0):
        with torch.no_grad():
            for name, parameter in tried.named_parameters():
                parameter.fill_(-offset if name == "weight" else 0.0)
            try:
                output = tried(hidden)
            except Exception:  # norms of mixers read a gate as well, and raise whatever their parts raise
                return None
        if not output.any():
            return offset
    return None


def _read_mixer(row: ModelType, roles: LayerRoles, name: str, mixer: nn.Module) -> None:
    """Add the roles of a mixer's modules, and what their stacked projections consist of."""
    outputs = [
        child for child in PROJECTIONS["output_projection"] if isinstance(getattr(mixer, child, None), nn.Module)
    ]
    roles.modules |= {f"{name}.{child}": "output_projection" for child in outputs}
    for child in STACKED:
        stacked = getattr(mixer, child, None)
        output = getattr(mixer, outputs[0], None) if outputs else None
        if isinstance(stacked, nn.Linear) and isinstance(output, nn.Linear):
            order = row.stacked.get(f"{type(mixer).__name__}.{child}")
            roles.parts[f"{name}.{child}"] = stacked_rows(stacked, output, order) if order else ()
    linear = {child: getattr(mixer, child, None) for child in _PROJECTIONS}
    # Layers that read keys and values of earlier layers (Gemma 4) lack these projections, despite their class.
    if has_heads(mixer) or type(mixer).__name__ == row.attention_class:
        roles.modules[name] = "attention"
    elif not outputs or not all(isinstance(module, nn.Linear) for module in linear.values()):
        return
    elif any(isinstance(module, nn.Conv1d) for module in mixer.modules()):
        return  # linear attention, which looks up no keys
    roles.modules |= {f"{name}.{child}": role for child, role in (_PROJECTIONS | _HEAD_NORMS).items()}
    width, keys = (getattr(getattr(mixer, child, None), "out_features", None) for child in ("q_proj", "k_proj"))
    groups = getattr(mixer, "num_key_value_groups", None)
    widths = (
        [keys * groups]
        if keys and groups
        else [getattr(getattr(mixer, child), "in_features", None) for child in outputs]
    )
    if width is not None and width not in widths:  # such as the query and a gate of each head
        roles.parts[f"{name}.q_proj"] = ()


def _read_network(row: ModelType, roles: LayerRoles, name: str, network: nn.Module) -> None:
    """Add the roles of a feed-forward network's matrices, or that it has experts."""
    if any(parameter.dim() > 2 for parameter in network.parameters()) or any(
        isinstance(module, nn.ModuleList) for module in network.modules()
    ):
        roles.has_experts = True
        return
    down = next((child for child, _ in network.named_children() if child in _DOWNS), "")
    following = getattr(network, down, None)
    width = getattr(following, "in_features", None)
    for role in ("gate", "up"):
        for child in PROJECTIONS[role]:
            module = getattr(network, child, None)
            if not isinstance(module, nn.Linear):
                continue
            roles.modules[f"{name}.{child}"] = role
            if width is not None and module.out_features == 2 * width:
                order = row.stacked.get(f"{type(network).__name__}.{child}")
                roles.parts[f"{name}.{child}"] = stacked_rows(module, following, order) if order else ()
            elif module.out_features != width:
                roles.parts[f"{name}.{child}"] = ()

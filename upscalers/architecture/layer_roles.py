"""Roles of a decoder layer's tensors, read from the layer that transformers builds on the meta device.

Projections are identified by their names and shapes, and norms around them by the row of the type. Whether a norm
multiplies by its weight or by 1 + weight is determined from its outputs.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from midus_hf.anatomy.types import ModelType
from midus_hf.memories.hosting.parts import (
    FEED_FORWARDS,
    KEY_NORMS,
    MIXERS,
    PROJECTIONS,
    STACKED,
    has_heads,
    stacked_rows,
)

_PROJECTIONS = {name: role for role in ("query", "key", "value") for name in PROJECTIONS[role]}
_HEAD_NORMS = {
    **dict.fromkeys(("q_norm", "q_layernorm", "query_layernorm"), "query_norm"),
    **dict.fromkeys(KEY_NORMS, "key_norm"),
}
_NORMS = ("attention_norm", "attention_output_norm", "mlp_norm", "mlp_output_norm")
# Names of the projections, and of a bias, by which feed-forward networks write to the residual stream.
_DOWNS = frozenset({*PROJECTIONS["down"], "down_proj_bias"})
# Names of feed-forward networks in stored checkpoints.
_NETWORKS = frozenset(FEED_FORWARDS)
# Roles by name: the modules that write per-layer embeddings to the residual stream, and the number that a layer's output is
# multiplied by.
_OF_LAYERS = {
    "per_layer_projection": "per_layer_projection",
    "post_per_layer_input_norm": "per_layer_output_norm",
    "layer_scalar": "layer_scalar",
}
# Seed and number of the rows that a norm is tested with.
_SEED, _ROWS = 0, 4


@dataclass
class LayerRoles:
    """Purposes of the modules of a decoder layer.

    Args:
        modules: Role of each module whose role is known, by its name within the layer. The role is also that of the modules
            within, unless these have their own.
        offsets: What a norm's weight is added to before it multiplies, by the name of the weight within the layer; None if that
            could not be determined.
        parts: Roles of the projections whose rows a linear module stacks, each with its number of rows, by the name of the
            module within the layer; empty if they are stacked in an unknown order.
        has_experts: Whether a feed-forward network of the layer is a mixture of experts.
    """

    modules: dict[str, str]
    offsets: dict[str, float | None] = field(default_factory=dict)
    parts: dict[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    has_experts: bool = False

    def role(self, name: str) -> str:
        """Return the role of a tensor by its name within the layer; `"base"` if the role is unknown."""
        parts = name.split(".")
        if parts[0] in _NETWORKS and not _DOWNS.isdisjoint(parts):
            return "down"
        prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        return next((self.modules[prefix] for prefix in prefixes if prefix in self.modules), "base")


def read_roles(row: ModelType, layer: nn.Module) -> LayerRoles:
    """Return what the modules of a layer on the meta device do, of a model type."""
    parts = row.layers[type(layer).__name__]
    roles = LayerRoles({**_OF_LAYERS, **{norm: role for role in _NORMS if (norm := getattr(parts, role))}})
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
    """Return what a norm adds to its weight before it multiplies: 0 or 1; None if the norm is neither kind.

    A norm without gain and bias gives zero, so the norm is tested with the weights that would mean a gain of zero.
    """
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
    """Add the roles within a module that mixes tokens: its output projection, and the projections and norms of heads."""
    outputs = [
        child for child in PROJECTIONS["output_projection"] if isinstance(getattr(mixer, child, None), nn.Module)
    ]
    roles.modules |= {f"{name}.{child}": "output_projection" for child in outputs}
    for child in STACKED:
        stacked, behind = getattr(mixer, child, None), getattr(mixer, outputs[0], None) if outputs else None
        if isinstance(stacked, nn.Linear) and isinstance(behind, nn.Linear):
            order = row.stacked.get(f"{type(mixer).__name__}.{child}")
            roles.parts[f"{name}.{child}"] = stacked_rows(stacked, behind, order) if order else ()
    linear = {child: getattr(mixer, child, None) for child in _PROJECTIONS}
    # Layers that read keys and values of earlier layers (Gemma 4) have the class of the others, and not their projections.
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
    if width is not None and width not in widths:  # such as a gate beside the query of each head
        roles.parts[f"{name}.q_proj"] = ()


def _read_network(row: ModelType, roles: LayerRoles, name: str, network: nn.Module) -> None:
    """Add the roles of a feed-forward network's projections but the last (see `LayerRoles.role`), or that it has experts."""
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

"""Layers, tensors and their roles: the facts about a model that are needed to edit its tensors.

A name such as `post_attention_layernorm` means different things in different families. The role of a tensor is
therefore read from what a layer does, and never guessed from the tensor's name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from midus_hf.config.model_sizes import ModelSizes
from midus_hf.memories.entries import NO_MEMORIES, Memories
from midus_hf.memories.options import InsertedOptions

Config = dict[str, Any]
Shape = tuple[int, ...]
# Settings of a layer, by the name of the module within the layer and the name of the setting.
Settings = dict[str, Any]

# Keys that only an upscaled model's config has, or whose values differ from the base's.
OF_UPSCALING = ("memory", "upscale", "auto_map", "architectures")
# Keys that do not change which tensors a model without memories has.
NOT_OF_BACKBONE = (*OF_UPSCALING, "quantization_config")


@dataclass(frozen=True)
class LayerTensor:
    """One tensor of a layer.

    Args:
        role: What the tensor does: `query`, `key`, `value`, `output_projection`, `query_norm`, `key_norm`, `gate`, `up`,
            `down`; `attention`, other tensors of attention, such as sinks; the norms before attention and feed-forward
            network, `attention_norm` and `mlp_norm`; the norms after them, `attention_output_norm` and
            `mlp_output_norm`; `per_layer_projection` and `per_layer_output_norm`, which write the layer's
            per-layer embeddings to the residual stream; `layer_scalar`, a number that the layer's output is multiplied
            by; `memory`; `buffer`, not a parameter; or `base`, whose purpose is unknown.
        shape: Shape that `config.json` implies.
        offset: Number that the tensor's values are added to before they multiply: 1 for a norm that multiplies by
            1 + weight. None for a norm for which this could not be determined. Default: 0.
        parts: Roles of the projections whose rows are stacked in the tensor, each with its number of rows, in order; empty if
            they are stacked in an unknown order. Default: None, the tensor belongs to one projection.
    """

    role: str
    shape: Shape
    offset: float | None = 0.0
    parts: tuple[tuple[str, int], ...] | None = None


@dataclass(frozen=True)
class Projection:
    """The weight or the bias of one projection: a tensor of a layer, or some of its rows.

    Args:
        role: Role of the projection.
        name: Name of the tensor within the layer.
        shape: Shape of the projection's part of the tensor.
        first_row: First row of the part. Default: 0.
        is_part: Whether the tensor has rows of other projections as well. Default: False.
    """

    role: str
    name: str
    shape: Shape
    first_row: int = 0
    is_part: bool = False

    @property
    def key(self) -> str:
        """Name of the tensor, and the role if the tensor has rows of other projections."""
        return f"{self.name} {self.role}" if self.is_part else self.name


def projections_of(tensors: Mapping[str, LayerTensor]) -> list[Projection]:
    """Return the projections of a layer, by the names and roles of its tensors, in the order in which they are stored."""
    projections = []
    for name, tensor in tensors.items():
        if tensor.parts is None:
            projections.append(Projection(tensor.role, name, tensor.shape))
            continue
        first = 0
        for role, rows in tensor.parts:
            projections.append(Projection(role, name, (rows, *tensor.shape[1:]), first, is_part=True))
            first += rows
    return [projection for projection in projections if projection.role in MATRIX_ROLES]


def roles_of(tensors: Mapping[str, LayerTensor]) -> frozenset[str]:
    """Return the roles of a layer's tensors, and of the projections that they stack."""
    return frozenset({tensor.role for tensor in tensors.values()} | {each.role for each in projections_of(tensors)})


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Layers, tensors and memories of a model, as transformers builds it from its config. Must not be modified.

    Args:
        sizes: Sizes that memories are built for.
        values: Values of the config as transformers resolved it, by key.
        backbone_layers: Roles and shapes of each layer's tensors without memories, by their name within the layer.
        outer: Shapes of the tensors outside the layers, by full name, including tables that layers share.
        tied: Shapes, by full name, of tensors that a checkpoint may hold although they only repeat others.
        layer_types: Type of each layer, listed in the config or implied by the family; None if there are no types.
        implied_types: The types that the family implies from the index of a layer; None if it implies none.
        per_layer_values: Values that describe single layers and that the config leaves out or may leave out, by key.
        layer_kinds: What the config says of each layer, such as its attention type; None if the config says nothing.
        norms_behind: Whether a norm follows the attention and the feed-forward network of each layer.
        num_leading_layers: Number of leading layers whose keys and values no later layer reuses. A new layer among or
            directly after these does not change which layer gives its keys and values to others.
        expert_layers: Indices of the layers whose feed-forward network is a mixture of experts.
        buffers: Full names of the tensors in a checkpoint that are not parameters.
        is_converted: Whether transformers converts tensors of the model when it loads a checkpoint.
        settings: Attributes of the modules of each layer that are not tensors.
        memories: Memories that the config lists. Default: none.
        integers: Dtype of each tensor that a memory stores as integers, by full name. Default: none.
        layers: Roles and shapes of each layer's tensors, memories' included, by their name within the layer. Default: none.
    """

    sizes: ModelSizes
    values: Config
    backbone_layers: list[dict[str, LayerTensor]]
    outer: dict[str, Shape]
    tied: dict[str, Shape]
    layer_types: list[str] | None
    implied_types: list[str] | None
    per_layer_values: Config
    layer_kinds: list[str] | None
    norms_behind: bool
    num_leading_layers: int
    expert_layers: frozenset[int]
    buffers: frozenset[str]
    is_converted: bool
    settings: tuple[Settings, ...]
    memories: Memories = NO_MEMORIES
    integers: dict[str, str] = field(default_factory=dict)
    layers: list[dict[str, LayerTensor]] = field(default_factory=list)


def kept_roles(options: InsertedOptions) -> frozenset[str]:
    """Return the roles of the layer tensors that a block with this memory keeps."""
    return ATTENTION_ROLES | ATTENTION_OUTPUT_ROLES if options.output_projection else ATTENTION_ROLES


# Roles of the projections of a layer, in the order in which the layer uses them.
MATRIX_ROLES = ("query", "key", "value", "output_projection", "gate", "up", "down")

# Roles of the projections that a method needs to predict or match matrices. Feed-forward networks of two matrices have
# no gate.
NEEDED_MATRICES = frozenset(MATRIX_ROLES) - {"gate"}

# Roles of what attention needs without its output projection, and of the norm before attention.
ATTENTION_ROLES = frozenset({"query", "key", "value", "query_norm", "key_norm", "attention_norm", "attention"})

# Roles of what follows the heads of an attention, up to the residual stream.
ATTENTION_OUTPUT_ROLES = frozenset({"output_projection", "attention_output_norm"})

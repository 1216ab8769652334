"""A family of base models: the facts that surgery on its tensors needs.

A name such as `post_attention_layernorm` means different things in different families. The role of a tensor is
therefore looked up here and never guessed from the tensor's name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from midus_hf.config.backbone import Backbone, FamilyTraits, read_backbone
from midus_hf.config.declared_tensors import DeclaredTensor
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.memories.entries import ATTACHED, INSERTED, NO_MEMORIES, TABLES, Memories, read_memories
from midus_hf.memories.options import InsertedOptions
from upscalers.architecture.per_layer import check_list
from upscalers.request.errors import RequestError, refusing_requests

Config = dict[str, Any]
Shape = tuple[int, ...]

# Keys that an upscaled model's config has and its base's has not, or that differ.
OF_UPSCALING = ("memory", "upscale", "auto_map", "architectures")
# Keys that do not change which tensors a model without memories has.
NOT_OF_BACKBONE = (*OF_UPSCALING, "quantization_config")


@dataclass(frozen=True)
class LayerTensor:
    """One tensor of a layer.

    Args:
        role: What the tensor does: `query`, `key`, `value`, `output_projection`, `query_norm`, `key_norm`, `gate`, `up`,
            `down`; `attention`, what else attention has, such as sinks; the norms in front of attention and feed-forward
            network, `attention_norm` and `mlp_norm`; the norms behind them, `attention_output_norm` and
            `mlp_output_norm`; `per_layer_projection` and `per_layer_output_norm`, which write what the layer reads from
            embeddings per layer to the residual stream; `layer_scalar`, a number that the layer's output is multiplied
            by; `memory`; `buffer`, what is no parameter; or `base`, whose purpose is unknown.
        shape: Shape that `config.json` implies.
        offset: Number that the tensor's values are added to before they multiply: 1 for a norm that multiplies by
            1 + weight. None for a norm of which this could not be read. Default: 0.
        parts: Roles of the projections whose rows are stacked in the tensor, each with its number of rows, in order; empty if
            they are stacked in an unknown order. Default: None, the tensor is one projection's.
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


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Layers, tensors and memories of a model, as its raw config describes them. Nobody may change the values.

    Args:
        sizes: Sizes that memories are built for.
        backbone_layers: Roles and shapes of each layer's tensors without memories, by their name within the layer.
        outer: Shapes of the tensors outside the layers, by full name, tables that layers share included.
        tied: Shapes, by full name, of tensors that a checkpoint may hold although they only repeat others.
        layer_types: Type of each layer, listed in the config or implied by the family; None if there are no types.
        implies_types: Whether the layers have the types that the family implies from their index. Default: False.
        per_layer_values: Values that describe single layers and that the config leaves out or may leave out, by key.
        layer_kinds: What the config says of each layer, such as its attention type; None if the config says nothing.
        norms_behind: Whether a norm follows the attention and the feed-forward network of each layer.
        num_leading_layers: Number of leading layers of which no later layer takes keys and values. A new layer among or
            directly behind these leaves unchanged which layer gives its keys and values to others.
        expert_layers: Indices of the layers whose feed-forward network is a mixture of experts. Default: none.
        buffers: Full names of the tensors that a checkpoint holds and that are no parameters. Default: none.
        is_converted: Whether transformers converts tensors of the model when it loads a checkpoint. Default: False.
        settings: Values of the modules of each layer that are no tensors, as far as they are known. Default: unknown.
        memories: Memories that the config lists. Default: none.
        integers: Dtype of each tensor that a memory stores as integers, by full name. Default: none.
        layers: Roles and shapes of each layer's tensors, memories' included, by their name within the layer. Default: none.
    """

    sizes: ModelSizes
    backbone_layers: list[dict[str, LayerTensor]]
    outer: dict[str, Shape]
    tied: dict[str, Shape]
    layer_types: list[str] | None
    implies_types: bool = False
    per_layer_values: Config
    layer_kinds: list[str] | None
    norms_behind: bool
    num_leading_layers: int
    expert_layers: frozenset[int] = frozenset()
    buffers: frozenset[str] = frozenset()
    is_converted: bool = False
    settings: tuple[dict[str, Any], ...] = ()
    memories: Memories = NO_MEMORIES
    integers: dict[str, str] = field(default_factory=dict)
    layers: list[dict[str, LayerTensor]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Family(FamilyTraits):
    """One family: how the family differs from Llama, and how the attention types of its layers follow from a config.

    Args:
        model_type: `model_type` in `config.json`.
        class_name: Middle part of the names of the classes that host memory, `Midus{class_name}ForCausalLM`. None
            where the family has no classes that host memory, so that only methods that add layers of the family's own
            kind apply.
        layer_types: Returns the types that layers have if the config does not list types. None if the family has no
            types.
    """

    model_type: str
    class_name: str | None
    layer_types: Callable[[Config], list[str]] | None = None

    def layout(self, config: Config) -> Layout:
        """Return what the raw config of a model says, with its memories.

        Raises:
            RequestError: If a size is missing or wrong, or if the `memory` list is malformed or does not fit the model.
        """
        backbone = self.backbone(config)
        if config.get("memory") in (None, []):
            return replace(backbone, layers=backbone.backbone_layers)
        with refusing_requests():
            memories = read_memories(config["memory"], backbone.sizes, config.get("upscale"))
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
            declared |= {f"model.layers.{layer}.{name}": tensor for name, tensor in own.items()}
            layers.append(tensors | {name: LayerTensor("memory", tensor.shape) for name, tensor in own.items()})
        return replace(
            backbone,
            memories=memories,
            layers=layers,
            outer=backbone.outer | tables,
            buffers=backbone.buffers | {name for name, tensor in declared.items() if tensor.role == "buffer"},
            integers={name: tensor.dtype for name, tensor in declared.items() if tensor.dtype},
        )

    def backbone(self, config: Config) -> Layout:
        """Return what the raw config of a model says, without its memories.

        Raises:
            RequestError: If a size is missing or not a positive integer, or if `layer_types` is no list of names.
        """
        native = {key: value for key, value in config.items() if key not in NOT_OF_BACKBONE}
        try:
            backbone = read_backbone({**native, "model_type": self.model_type})
        except ValueError as error:
            raise RequestError(f"{error} Repair config.json of the base.") from None
        hidden, vocabulary = backbone.sizes.hidden_size, backbone.vocabulary
        outer: dict[str, Shape] = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
        head: dict[str, Shape] = {"lm_head.weight": (vocabulary, hidden)}
        implied = None if self.layer_types is None else self.layer_types(config)
        types = implied if implied is None or config.get("layer_types") is None else config["layer_types"]
        if types is not None and not (
            isinstance(types, list) and all(isinstance(layer_type, str) for layer_type in types)
        ):
            raise RequestError(
                f"config.json has layer_types = {types!r}; expected a list of names, one per layer. "
                "Repair the base checkpoint."
            )
        if types is not None:
            check_list("layer_types", types, backbone.sizes.num_layers)
            known = sorted({"full_attention", "sliding_attention", *(implied or ())})
            unknown = next((layer_type for layer_type in types if layer_type not in known), None)
            if unknown is not None:
                raise RequestError(
                    f"config.json lists {unknown!r} in layer_types; expected {' or '.join(known)} in a {self.model_type} model. "
                    "Repair the base checkpoint."
                )
        return Layout(
            sizes=backbone.sizes,
            backbone_layers=[self._layer_tensors(backbone)] * backbone.sizes.num_layers,
            outer=outer if backbone.tied else {**outer, **head},
            tied=head if backbone.tied else {},
            layer_types=types,
            implies_types=types is not None and types == implied,
            per_layer_values={} if types is None else {"layer_types": types},
            layer_kinds=types,
            norms_behind=self.output_norms,
            num_leading_layers=backbone.sizes.num_layers,
        )

    def _layer_tensors(self, backbone: Backbone) -> dict[str, LayerTensor]:
        """Return roles and shapes of the tensors of one decoder layer, by their name within the layer."""
        hidden, inner, d = backbone.sizes.hidden_size, backbone.sizes.intermediate_size, backbone.sizes.head_dim
        query_width, key_width = backbone.sizes.num_heads * d, backbone.sizes.num_key_value_heads * d
        offset = 1.0 if self.unit_offset_norms else 0.0
        tensors: dict[str, LayerTensor] = {}
        for name, role, out_width, in_width, bias in (
            ("self_attn.q_proj", "query", query_width, hidden, backbone.attention_bias),
            ("self_attn.k_proj", "key", key_width, hidden, backbone.attention_bias),
            ("self_attn.v_proj", "value", key_width, hidden, backbone.attention_bias),
            ("self_attn.o_proj", "output_projection", hidden, query_width, backbone.output_bias),
            ("mlp.gate_proj", "gate", inner, hidden, backbone.mlp_bias),
            ("mlp.up_proj", "up", inner, hidden, backbone.mlp_bias),
            ("mlp.down_proj", "down", hidden, inner, backbone.mlp_bias),
        ):
            if name == "mlp.gate_proj" and self.query_key_norm:
                whole = self.query_key_norm == "whole"
                tensors["self_attn.q_norm.weight"] = LayerTensor("query_norm", (query_width if whole else d,), offset)
                tensors["self_attn.k_norm.weight"] = LayerTensor("key_norm", (key_width if whole else d,), offset)
            tensors[f"{name}.weight"] = LayerTensor(role, (out_width, in_width))
            if bias:
                tensors[f"{name}.bias"] = LayerTensor(role, (out_width,))
        norms = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
        if self.output_norms:
            norms = {
                "input_layernorm": "attention_norm",
                "post_attention_layernorm": "attention_output_norm",
                "pre_feedforward_layernorm": "mlp_norm",
                "post_feedforward_layernorm": "mlp_output_norm",
            }
            if not self.input_norms:
                norms = {name: role for name, role in norms.items() if role not in ("attention_norm", "mlp_norm")}
        for name, role in norms.items():
            tensors[f"{name}.weight"] = LayerTensor(role, (hidden,), offset)
        return tensors


def kept_roles(options: InsertedOptions) -> frozenset[str]:
    """Return the roles of the layer tensors that a block with this memory keeps."""
    return ATTENTION_ROLES | ATTENTION_OUTPUT_ROLES if options.output_projection else ATTENTION_ROLES


# Roles of the projections of a layer, in the order in which the layer uses them.
MATRIX_ROLES = ("query", "key", "value", "output_projection", "gate", "up", "down")

# Roles of the projections without which a method that predicts or matches matrices has nothing to work on. Feed-forward
# networks of two matrices have no gate.
NEEDED_MATRICES = frozenset(MATRIX_ROLES) - {"gate"}

# Roles of what attention needs without its output projection, and of the norm in front of attention.
ATTENTION_ROLES = frozenset({"query", "key", "value", "query_norm", "key_norm", "attention_norm", "attention"})

# Roles of what follows the heads of an attention, up to the residual stream.
ATTENTION_OUTPUT_ROLES = frozenset({"output_projection", "attention_output_norm"})


def positive(config: Config, key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise RequestError(
            f"config.json has {key} = {value!r}; expected a positive integer. Repair the base checkpoint."
        )
    return value

"""A family of base models: the facts that surgery on its tensors needs.

A name such as `post_attention_layernorm` means different things in different families. The role of a tensor is
therefore looked up here and never guessed from the tensor's name.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from midus_hf.config.backbone import Backbone, FamilyTraits, read_backbone
from midus_hf.config.model_sizes import ModelSizes
from upscalers.request.errors import RequestError

Config = dict[str, Any]
Shape = tuple[int, ...]

# Keys that an upscaled model's config has and its base's has not, and one that does not change which tensors are read.
OF_UPSCALING = ("memory", "upscale", "auto_map", "architectures", "quantization_config")


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


@cache
def _read_backbone(native: str) -> Backbone:
    """Return sizes and biases of a config without memories, in JSON."""
    return read_backbone(json.loads(native))


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
        period: Returns the number of layers after which the types repeat. Default: 1, for types that need not repeat.
        implying: Returns the config values from which exactly the given types would follow, as far as config values
            decide the types. Default: no values.
    """

    model_type: str
    class_name: str | None
    layer_types: Callable[[Config], list[str]] | None = None
    period: Callable[[Config], int] = lambda config: 1
    implying: Callable[[list[str]], Config] = lambda layer_types: {}

    #: Whether a layer may be of another kind than its neighbours by its index alone, which no list in the config says.
    layers_may_follow_from_indices: ClassVar[bool] = False

    @property
    def hosts_memory(self) -> bool:
        """True if there are classes of this family that host memory."""
        return self.class_name is not None

    def backbone(self, config: Config) -> Backbone:
        """Return the sizes and biases that a config says, with the family's defaults for keys that the config leaves out.

        Raises:
            RequestError: If a size is missing or not a positive integer.
        """
        native = {key: value for key, value in config.items() if key not in OF_UPSCALING}
        try:
            return _read_backbone(json.dumps({**native, "model_type": self.model_type}, sort_keys=True))
        except ValueError as error:
            raise RequestError(f"{error} Repair config.json of the base.") from None

    def sizes(self, config: Config) -> ModelSizes:
        """Return the sizes that memories are built for."""
        return self.backbone(config).sizes

    def resolved_layer_types(self, config: Config) -> list[str] | None:
        """Return the type of each layer, listed in the config or implied by the family; None if the family has no types.

        Raises:
            RequestError: If `layer_types` in the config is no list of names.
        """
        if self.layer_types is None:
            return None
        listed = config.get("layer_types")
        if listed is None:
            return self.layer_types(config)
        if not isinstance(listed, list) or not all(isinstance(layer_type, str) for layer_type in listed):
            raise RequestError(
                f"config.json has layer_types = {listed!r}; expected a list of names, one per layer. "
                "Repair the base checkpoint."
            )
        return listed

    def per_layer_values(self, config: Config) -> Config:
        """Return the values of the config that describe single layers and that the config may leave out, by key."""
        layer_types = self.resolved_layer_types(config)
        return {} if layer_types is None else {"layer_types": layer_types}

    def layer_kinds(self, config: Config) -> list[str] | None:
        """Return what the config says of each layer, such as the layer's attention type; None if the config says nothing."""
        return self.resolved_layer_types(config)

    def norms_behind(self, config: Config) -> bool:
        """Return whether a norm follows the attention and the feed-forward network of each layer."""
        return self.output_norms

    def expert_layers(self, config: Config) -> frozenset[int]:
        """Return the indices of the layers whose feed-forward network is a mixture of experts."""
        return frozenset()

    def layer_that_changes(self, config: Config, new_config: Config, sources: list[int]) -> str | None:
        """Return which layer computes otherwise than its source by its index alone, and what differs; None if none does.

        Args:
            config: Raw config of a model.
            new_config: Raw config of a model that is made from its layers.
            sources: For each layer of the new model, the layer of the first model that it is made from.
        """
        return None

    def period_of(self, config: Config) -> int | None:
        """Return p, the number of layers after which the attention types repeat, counted from the first layer.

        The period is 1 where a layer of any type may stand anywhere, or where all types are alike. It is None where
        the types that the config lists do not repeat.
        """
        types = self.resolved_layer_types(config)
        if types is None or self.layer_types is None:
            return 1
        if types == self.layer_types(config):
            return self.period(config)
        repeated = (
            period
            for period in range(1, len(types) // 2 + 1)
            if all(types[layer] == types[layer - period] for layer in range(period, len(types)))
        )
        return next(repeated, None)

    def layer_tensors(self, config: Config, layer: int = 0) -> dict[str, LayerTensor]:
        """Return roles and shapes of the tensors of one decoder layer, by their name within the layer.

        Args:
            config: Raw config of the model.
            layer: Index of the layer, which matters only where layers differ. Default: 0.
        """
        backbone = self.backbone(config)
        hidden, inner, d = backbone.sizes.hidden_size, backbone.sizes.intermediate_size, backbone.sizes.head_dim
        query_width, key_width = backbone.query_width, backbone.key_width
        offset = 1.0 if self.unit_offset_norms else 0.0
        tensors: dict[str, LayerTensor] = {}

        def linear(name: str, role: str, out_width: int, in_width: int, bias: bool) -> None:
            tensors[f"{name}.weight"] = LayerTensor(role, (out_width, in_width))
            if bias:
                tensors[f"{name}.bias"] = LayerTensor(role, (out_width,))

        linear("self_attn.q_proj", "query", query_width, hidden, backbone.attention_bias)
        linear("self_attn.k_proj", "key", key_width, hidden, backbone.attention_bias)
        linear("self_attn.v_proj", "value", key_width, hidden, backbone.attention_bias)
        linear("self_attn.o_proj", "output_projection", hidden, query_width, backbone.output_bias)
        if self.query_key_norm:
            whole = self.query_key_norm == "whole"
            tensors["self_attn.q_norm.weight"] = LayerTensor("query_norm", (query_width if whole else d,), offset)
            tensors["self_attn.k_norm.weight"] = LayerTensor("key_norm", (key_width if whole else d,), offset)
        linear("mlp.gate_proj", "gate", inner, hidden, backbone.mlp_bias)
        linear("mlp.up_proj", "up", inner, hidden, backbone.mlp_bias)
        linear("mlp.down_proj", "down", hidden, inner, backbone.mlp_bias)
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

    def layers(self, config: Config) -> list[dict[str, LayerTensor]]:
        """Return roles and shapes of the tensors of every layer, read from the config once; nobody may change them."""
        return [self.layer_tensors(config)] * config["num_hidden_layers"]

    def outer_tensors(self, config: Config) -> dict[str, Shape]:
        """Return the shapes of the tensors outside the layers, by full name."""
        backbone = self.backbone(config)
        hidden, vocabulary = backbone.sizes.hidden_size, backbone.vocabulary
        tensors: dict[str, Shape] = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
        return tensors if backbone.tied else {**tensors, "lm_head.weight": (vocabulary, hidden)}

    def tied_tensors(self, config: Config) -> dict[str, Shape]:
        """Return the shapes, by full name, of tensors that a checkpoint may hold although they only repeat others."""
        backbone = self.backbone(config)
        return {"lm_head.weight": (backbone.vocabulary, backbone.sizes.hidden_size)} if backbone.tied else {}

    def is_converted(self, config: Config) -> bool:
        """Return whether transformers converts tensors of the model when it loads a checkpoint."""
        return False

    def prove(self, site: str, memory_type: str) -> None:
        """Prove that a memory of a type is wired right at a site of the family's layers.

        Raises:
            RequestError: If the memory is not wired right, or the site cannot be proven.
        """

    def remarks(self) -> list[str]:
        """Return what a person should know of how the family was checked for memories."""
        return []

    def blocks_by_layer(self, config: Config) -> dict[str, int]:
        """Return the dimension along which a tensor outside the layers holds one equal block for each layer, by full name.

        An example are embeddings per layer, which stand side by side as columns of one tensor.
        """
        return {}

    def num_leading_layers(self, config: Config) -> int:
        """Return the number of leading layers of which no later layer takes keys and values.

        A new layer among or directly behind these leaves unchanged which layer gives its keys and values to others.
        """
        return positive(config, "num_hidden_layers")

    def buffers(self, config: Config) -> frozenset[str]:
        """Return the full names of the tensors that a checkpoint holds and that are no parameters."""
        return frozenset()


# Roles of the norms, whose gain is 1 + weight in families with `unit_offset_norms`.
NORM_ROLES = frozenset(
    {"attention_norm", "mlp_norm", "attention_output_norm", "mlp_output_norm", "query_norm", "key_norm"}
)

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

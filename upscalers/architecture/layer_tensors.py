"""Layers, tensors and their roles, and the values of a config that describe single layers.

Names such as `post_attention_layernorm` mean different things in different families: roles follow what a layer does.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from midus_hf.anatomy.types import MAIN_TYPES, MEMORY_PREFIX, ModelType, model_type_of
from midus_hf.config.declared_tensors import ModelSizes
from midus_hf.config.errors import RequestError
from midus_hf.memories.options import InsertedOptions
from midus_hf.memories.registry import NO_MEMORIES, Memories

Config = dict[str, Any]
Shape = tuple[int, ...]
# By the name of the module within the layer, and of the setting.
Settings = dict[str, Any]

# Keys that only an upscaled model's config has, or whose values differ from the base's.
OF_UPSCALING = ("memory", "upscale", "auto_map", "architectures")
# Keys that do not change which tensors a model without memories has.
NOT_OF_BACKBONE = (*OF_UPSCALING, "quantization_config")

# In the order in which the layer uses them.
MATRIX_ROLES = ("query", "key", "value", "output_projection", "gate", "up", "down")
# Feed-forward networks of two matrices have no gate.
NEEDED_MATRICES = frozenset(MATRIX_ROLES) - {"gate"}
ATTENTION_ROLES = frozenset({"query", "key", "value", "query_norm", "key_norm", "attention_norm", "attention"})
ATTENTION_OUTPUT_ROLES = frozenset({"output_projection", "attention_output_norm"})

# Lists with one entry per layer, at the top of a config or inside its mappings: their entries follow the plan.
PER_LAYER_KEYS = frozenset(
    {
        "layer_types", "layer_rope_theta", "mlp_layer_types", "no_rope_layers", "num_attention_heads_per_layer",
        "indexer_types",
    }
)  # fmt: skip
# Lists of layer indices: each index is replaced by the indices that the layer has in the upscaled model.
LAYER_INDEX_KEYS = frozenset({"mlp_only_layers", "moe_layers", "full_attn_idxs", "attn_layer_indices"})
# Mappings by layer index, with entries for some layers: each entry follows its layer.
PER_LAYER_MAPPING_KEYS = frozenset({"per_layer_config"})
# Indices that separate leading layers from the others, each with what must be added for the number of leading layers.
LEADING_LAYERS_KEYS = {
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
    "moe_layer_start_index": 0,
    "moe_layer_end_index": 1,
}
SHARED_LAYERS_KEY = "num_kv_shared_layers"
GIVES_KEYS = "store_full_length_kv"
# Values that never describe single layers of the base, whatever their length, or that other code updates.
NOT_PER_LAYER_KEYS = frozenset(
    {
        "architectures", "bos_token_id", "eos_token_id", "pad_token_id", "bad_words_ids", "suppress_tokens",
        "begin_suppress_tokens", "forced_decoder_ids", "id2label", "label2id", "long_factor", "short_factor", "mrope_section",
        "memory", "upscale", "quantization_config",
    }
)  # fmt: skip
# Configs of Transformers that dequantise weights as they are loaded, by `quant_method`.
_DEQUANTISING = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}


@dataclass(frozen=True)
class LayerTensor:
    """One tensor of a layer, with its role.

    Roles are `query`, `key`, `value`, `output_projection`, `query_norm`, `key_norm`, `gate`, `up`, `down`; `attention`, other tensors
    of attention, such as sinks; the norms before attention and feed-forward network, `attention_norm` and `mlp_norm`, and after them,
    `attention_output_norm` and `mlp_output_norm`; `per_layer_projection` and `per_layer_output_norm`, which write per-layer
    embeddings to the residual stream; `layer_scalar`, a factor of the layer's output; `memory`; `buffer`; or `base`, of unknown
    purpose.
    """

    role: str
    shape: Shape  # by the config
    offset: float | None = 0.0  # added to a norm's weight, 0 or 1, before it multiplies; None if it is not known
    # Roles and numbers of rows of stacked projections, in order, or empty if unknown; None for one projection.
    parts: tuple[tuple[str, int], ...] | None = None


@dataclass(frozen=True)
class Projection:
    """The weight or the bias of one projection: a tensor of a layer, or some of its rows."""

    role: str
    name: str  # of the tensor, within the layer
    shape: Shape  # of the projection's part of the tensor
    first_row: int = 0
    is_part: bool = False  # whether the tensor has rows of other projections as well

    @property
    def key(self) -> str:
        return f"{self.name} {self.role}" if self.is_part else self.name


def projections_of(tensors: Mapping[str, LayerTensor]) -> list[Projection]:
    """Return the projections of a layer from its tensors by name, in stored order."""
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
    """Layers, tensors and memories of a model, by its config. Must not be modified."""

    sizes: ModelSizes  # that memories are built for
    values: Config  # as transformers resolved the config
    backbone_layers: list[dict[str, LayerTensor]]  # tensors of each layer without memories, by name within the layer
    outer: dict[str, Shape]  # of tensors outside the layers, tables that layers share included, by full name
    tied: dict[str, Shape]  # of tensors that a checkpoint may hold although they only repeat others
    layer_types: list[str] | None  # listed in the config or implied by the family
    implied_types: list[str] | None  # by the family, from the index of a layer
    per_layer_values: Config  # values that describe single layers and that the config leaves out or may leave out
    layer_kinds: list[str] | None  # what the config says of each layer, such as its attention type
    norms_behind: bool  # whether a norm follows the attention and the feed-forward network of each layer
    # Leading layers whose keys and values no later layer reuses; new layers among or directly after them change no source.
    num_leading_layers: int
    expert_layers: frozenset[int]  # whose feed-forward network is a mixture of experts
    buffers: frozenset[str]  # full names of tensors in a checkpoint that are not parameters
    is_converted: bool  # whether transformers converts tensors when it loads a checkpoint
    settings: tuple[Settings, ...]  # attributes of the modules of each layer that are not tensors
    memories: Memories = NO_MEMORIES
    integers: dict[str, str] = field(default_factory=dict)  # dtype of each tensor that a memory stores as integers
    layers: list[dict[str, LayerTensor]] = field(default_factory=list)  # tensors of each layer, memories' included


def kept_roles(options: InsertedOptions) -> frozenset[str]:
    """Return the roles of the layer tensors that a block with this memory keeps."""
    return ATTENTION_ROLES | ATTENTION_OUTPUT_ROLES if options.output_projection else ATTENTION_ROLES


def check_list(key: str, values: list[Any], num_layers: int, path: str | None = None) -> None:
    """Refuse a list without one value per layer, or with a missing layer; ignore lists of other kinds.

    `path` leads to the list from the top of the config; by default it is the key.
    """
    path = path or key
    if key in PER_LAYER_KEYS and len(values) != num_layers:
        raise RequestError(
            f"config.json lists {len(values)} {path}; expected {num_layers}, one per layer (num_hidden_layers). Repair the base "
            "checkpoint."
        )
    if key in LAYER_INDEX_KEYS:
        stray = [layer for layer in values if type(layer) is not int or not 0 <= layer < num_layers]
        if stray:
            raise RequestError(
                f"config.json lists {stray[0]!r} in {path}; expected layers from 0 to {num_layers - 1} (num_hidden_layers is "
                f"{num_layers}). Repair the base checkpoint."
            )


def check_lists(config: Mapping[str, Any]) -> None:
    """Apply `check_list` to all lists of a config that failed."""
    num_layers = config.get("num_hidden_layers")
    for key, values in config.items():
        if isinstance(num_layers, int) and isinstance(values, list):
            check_list(key, values, num_layers)


def family_of(config: Config, *outer: Config) -> ModelType:
    """Return a config's model type; refuse types not proven, quantised models and custom code.

    `outer` is the config of the composite model, if there is one.
    """
    for each in (*outer, config):
        if quantization := each.get("quantization_config"):
            method = quantization.get("quant_method") if isinstance(quantization, dict) else None
            remedy = "Start from the unquantised checkpoint."
            if method in _DEQUANTISING:
                remedy = (
                    "Dequantise it first, in Python: AutoModelForCausalLM.from_pretrained(BASE, dtype='auto', quantization_config="
                    f"{_DEQUANTISING[method]}(dequantize=True)).save_pretrained('base'), and its AutoTokenizer likewise."
                )
            raise RequestError(
                f"the base is quantised (quantization_config: {method or 'unknown'}); expected float32, float16 or bfloat16 "
                f"weights. {remedy}"
            )
        if each.get("auto_map") and not str(each.get("model_type")).startswith(MEMORY_PREFIX):
            raise RequestError(
                "the base has custom code (auto_map in config.json), which is never run; expected a native checkpoint. "
                "If its weights are those of the native class, remove auto_map from config.json."
            )
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise RequestError(
            f"config.json has model_type = {model_type!r}; expected one of: {', '.join(MAIN_TYPES)}. Restore the config.json that "
            "the base was published with."
        )
    return model_type_of(model_type)

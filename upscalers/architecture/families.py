"""Families of base models, with the facts that surgery on their tensors needs.

A name such as `post_attention_layernorm` means different things in different families. The role of a tensor is
therefore looked up here and never guessed from the tensor's name. Everything is read from the raw `config.json`, so
planning an upscaling loads neither torch nor transformers.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from midus_hf.config.backbone import FAMILY_TRAITS, MEMORY_PREFIX, FamilyTraits
from midus_hf.config.model_sizes import ModelSizes, activation_of
from midus_hf.config.plugins import load_offered
from upscalers.request.errors import RequestError, refusing_requests

Config = dict[str, Any]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class LayerTensor:
    """One tensor of a layer.

    Args:
        role: What the tensor does: `query`, `key`, `value`, `output_projection`, `query_norm`, `key_norm`, `gate`,
            `up`, `down`; the norms in front of attention and feed-forward network, `attention_norm` and `mlp_norm`;
            the norms behind them, `attention_output_norm` and `mlp_output_norm`; or `memory`.
        shape: Shape that `config.json` implies.
    """

    role: str
    shape: Shape


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

    @property
    def hosts_memory(self) -> bool:
        """True if there are classes of this family that host memory."""
        return self.class_name is not None

    def get(self, config: Config, key: str) -> Any:
        """Return the value of `key`, or the family's default where the config does not have the key."""
        return config.get(key, self.defaults.get(key))

    def num_heads(self, config: Config) -> int:
        """Return H, the number of query heads."""
        return _positive(config, "num_attention_heads")

    def num_key_value_heads(self, config: Config) -> int:
        """Return the number of key/value heads; if neither config nor family gives one, the number of query heads."""
        if self.get(config, "num_key_value_heads") is None:
            return self.num_heads(config)
        return _positive({**self.defaults, **config}, "num_key_value_heads")

    def head_dim(self, config: Config) -> int:
        """Return d, the width of a head; if neither config nor family gives one, D / H."""
        if self.get(config, "head_dim") is None:
            return _positive(config, "hidden_size") // self.num_heads(config)
        return _positive({**self.defaults, **config}, "head_dim")

    def sizes(self, config: Config) -> ModelSizes:
        """Return the sizes that memories are built for."""
        return ModelSizes(
            hidden_size=_positive(config, "hidden_size"),
            num_heads=self.num_heads(config),
            head_dim=self.head_dim(config),
            num_key_value_heads=self.num_key_value_heads(config),
            intermediate_size=_positive(config, "intermediate_size"),
            num_layers=config["num_hidden_layers"],
            activation=activation_of({**self.defaults, **config}),
        )

    def tie_word_embeddings(self, config: Config) -> bool:
        """Return whether the language head is tied to the embedding."""
        return bool(self.get(config, "tie_word_embeddings"))

    def resolved_layer_types(self, config: Config) -> list[str] | None:
        """Return the type of each layer, listed in the config or implied by the family.

        Return None if the family has no types.

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

    def layer_tensors(self, config: Config) -> dict[str, LayerTensor]:
        """Return roles and shapes of the tensors of one decoder layer, by their name within the layer."""
        hidden, inner, d = (
            _positive(config, "hidden_size"),
            _positive(config, "intermediate_size"),
            self.head_dim(config),
        )
        query_width, key_width = self.num_heads(config) * d, self.num_key_value_heads(config) * d
        attention_bias, mlp_bias = (
            key in self.bias_keys and bool(config.get(key)) for key in ("attention_bias", "mlp_bias")
        )
        tensors: dict[str, LayerTensor] = {}

        def linear(name: str, role: str, out_width: int, in_width: int, bias: bool) -> None:
            tensors[f"{name}.weight"] = LayerTensor(role, (out_width, in_width))
            if bias:
                tensors[f"{name}.bias"] = LayerTensor(role, (out_width,))

        linear("self_attn.q_proj", "query", query_width, hidden, attention_bias or self.qkv_bias)
        linear("self_attn.k_proj", "key", key_width, hidden, attention_bias or self.qkv_bias)
        linear("self_attn.v_proj", "value", key_width, hidden, attention_bias or self.qkv_bias)
        linear("self_attn.o_proj", "output_projection", hidden, query_width, attention_bias)
        if self.query_key_norm:
            whole = self.query_key_norm == "whole"
            tensors["self_attn.q_norm.weight"] = LayerTensor("query_norm", (query_width if whole else d,))
            tensors["self_attn.k_norm.weight"] = LayerTensor("key_norm", (key_width if whole else d,))
        linear("mlp.gate_proj", "gate", inner, hidden, mlp_bias)
        linear("mlp.up_proj", "up", inner, hidden, mlp_bias)
        linear("mlp.down_proj", "down", hidden, inner, mlp_bias)
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
            tensors[f"{name}.weight"] = LayerTensor(role, (hidden,))
        return tensors

    def outer_tensors(self, config: Config) -> dict[str, Shape]:
        """Return the shapes of the tensors outside the layers, by full name."""
        hidden, vocabulary = _positive(config, "hidden_size"), _positive(config, "vocab_size")
        tensors: dict[str, Shape] = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
        if not self.tie_word_embeddings(config):
            tensors["lm_head.weight"] = (vocabulary, hidden)
        return tensors

    def tied_tensors(self, config: Config) -> dict[str, Shape]:
        """Return the shapes, by full name, of tensors that a checkpoint may hold although they only repeat others."""
        if not self.tie_word_embeddings(config):
            return {}
        return {"lm_head.weight": self.outer_tensors(config)["model.embed_tokens.weight"]}


# Roles of the norms, whose gain is 1 + weight in families with `unit_offset_norms`.
NORM_ROLES = frozenset(
    {"attention_norm", "mlp_norm", "attention_output_norm", "mlp_output_norm", "query_norm", "key_norm"}
)

# Roles of the projections of a layer, in the order in which the layer uses them.
MATRIX_ROLES = ("query", "key", "value", "output_projection", "gate", "up", "down")

# Roles of what attention needs without its output projection, and of the norm in front of attention.
ATTENTION_ROLES = frozenset({"query", "key", "value", "query_norm", "key_norm", "attention_norm"})

# Roles of what follows the heads of an attention, up to the residual stream.
ATTENTION_OUTPUT_ROLES = frozenset({"output_projection", "attention_output_norm"})


def _positive(config: Config, key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise RequestError(
            f"config.json has {key} = {value!r}; expected a positive integer. Repair the base checkpoint."
        )
    return value


def _qwen_layer_types(config: Config) -> list[str]:
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    first_sliding = config.get("max_window_layers", 28)
    if type(first_sliding) is not int:
        raise RequestError(
            f"config.json has max_window_layers = {first_sliding!r}; expected an integer. Repair the base checkpoint."
        )
    return [
        "sliding_attention" if window is not None and layer >= first_sliding else "full_attention"
        for layer in range(_positive(config, "num_hidden_layers"))
    ]


def _qwen_implying(layer_types: list[str]) -> Config:
    sliding = [layer for layer, layer_type in enumerate(layer_types) if layer_type == "sliding_attention"]
    return {"max_window_layers": min(sliding, default=len(layer_types))}


def _gemma2_layer_types(config: Config) -> list[str]:
    return [
        "full_attention" if layer % 2 else "sliding_attention"
        for layer in range(_positive(config, "num_hidden_layers"))
    ]


def _gemma3_period(config: Config) -> int:
    return _positive({"sliding_window_pattern": 6, **config}, "sliding_window_pattern")


def _gemma3_layer_types(config: Config) -> list[str]:
    period = _gemma3_period(config)
    return [
        "sliding_attention" if (layer + 1) % period else "full_attention"
        for layer in range(_positive(config, "num_hidden_layers"))
    ]


def _family(model_type: str, class_name: str, **of_layer_types: Any) -> Family:
    traits = FAMILY_TRAITS[model_type]
    of_traits = {field.name: getattr(traits, field.name) for field in fields(traits)}
    return Family(model_type=model_type, class_name=class_name, **of_traits, **of_layer_types)


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        _family("llama", "Llama"),
        _family("qwen2", "Qwen2", layer_types=_qwen_layer_types, implying=_qwen_implying),
        _family("qwen3", "Qwen3", layer_types=_qwen_layer_types, implying=_qwen_implying),
        _family("gemma2", "Gemma2", layer_types=_gemma2_layer_types, period=lambda config: 2),
        _family("gemma3_text", "Gemma3", layer_types=_gemma3_layer_types, period=_gemma3_period),
        _family("mistral", "Mistral"),
        _family("olmo2", "Olmo2"),
    )
}


def register_family(family: Family) -> Family:
    """Register a family under its `model_type`, for upscaling and for counting parameters and operations.

    Raises:
        ValueError: If the type is taken.
    """
    if family.model_type in FAMILIES:
        raise ValueError(f"family {family.model_type!r} is already registered; it is one of {', '.join(FAMILIES)}.")
    FAMILIES[family.model_type] = FAMILY_TRAITS[family.model_type] = family
    return family


def family_of(config: Config) -> Family:
    """Return the family of the model that a config describes, whether or not the model already hosts memory.

    Raises:
        RequestError: If no family has the config's model type, or the model is quantised, is a mixture of experts,
            shares keys and values between layers, predicts several tokens ahead, reads images, or brings code of its
            publisher.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise RequestError(
            f"config.json has model_type = {model_type!r}; expected one of: {', '.join(FAMILIES)}. Restore the config.json that "
            "the base was published with."
        )
    if config.get("quantization_config"):
        method = (
            config["quantization_config"].get("quant_method", "unknown")
            if isinstance(config["quantization_config"], dict)
            else "unknown"
        )
        raise RequestError(
            f"the base is quantised (quantization_config: {method}); expected float32, float16 or bfloat16 weights. "
            "Start from the unquantised checkpoint."
        )
    if config.get("auto_map") and not model_type.startswith(MEMORY_PREFIX):
        raise RequestError(
            "the base brings code of its own (auto_map in config.json), which is never run; expected a native checkpoint. "
            "If its weights are those of the native class, remove auto_map from config.json."
        )
    experts = next((key for key in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(key)), None)
    if experts or model_type.endswith("_moe") or model_type == "mixtral":
        raise RequestError(
            f"the base is a mixture of experts ({model_type}); expected a dense model of: {', '.join(FAMILIES)}."
        )
    if config.get("num_kv_shared_layers"):
        raise RequestError(
            f"the base shares keys and values between layers (num_kv_shared_layers = {config['num_kv_shared_layers']}); "
            "expected layers that stand alone."
        )
    for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers"):
        if config.get(key):
            raise RequestError(
                f"the base predicts several tokens ahead ({key} = {config[key]}); expected a model without such layers. "
                "Save its decoder as a checkpoint of its own first."
            )
    if model_type == "gemma3":
        raise RequestError(
            "model_type is 'gemma3', which reads images as well; expected the text model, 'gemma3_text'. "
            "Save its language_model as a checkpoint of its own first."
        )
    native_type = model_type.removeprefix(MEMORY_PREFIX)
    if native_type not in FAMILIES:
        with refusing_requests():
            load_offered("upscalers.families")
    if native_type not in FAMILIES:
        # No similar name is suggested: under another architecture's name, a base may load and compute something else.
        raise RequestError(
            f"model_type {model_type!r} is not supported; expected one of: {', '.join(FAMILIES)}. A family is added "
            "(CONTRIBUTING.md), not renamed: as another one it may load and still be a different model."
        )
    return FAMILIES[native_type]

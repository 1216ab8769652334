"""Layouts of models of the main types, from their rows in the table of types: torch is not imported.

A row has keys of a config with their types and defaults, and the tensors of a layer with their roles. A config with other keys,
or with a value that transformers may read differently or refuse, is left to transformers.
"""

from types import SimpleNamespace
from typing import Any

from midus_hf.anatomy.types import MAIN_TYPES, model_type_of
from upscalers.architecture.layer_tensors import Config, LayerTensor, Shape
from upscalers.architecture.per_layer import (
    LAYER_INDEX_KEYS,
    NOT_PER_LAYER_KEYS,
    PER_LAYER_KEYS,
    PER_LAYER_MAPPING_KEYS,
    SHARED_LAYERS_KEY,
)

_TYPES = "layer_types"
# Keys that change layers in ways that the row does not cover.
_UNUSUAL = (PER_LAYER_KEYS - {_TYPES}) | LAYER_INDEX_KEYS | PER_LAYER_MAPPING_KEYS | {SHARED_LAYERS_KEY}
# Number of layers from one with full attention to the next in families that alternate; a config of Gemma 3 may say another.
_PERIOD_KEY, _PERIODS = "sliding_window_pattern", {"gemma2": 2, "gemma3_text": 6}
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


def written_model(native: Config) -> dict[str, Any] | None:
    """Return the arguments that describe a model (`layout.py`), by its config; None if transformers has to read it."""
    if native["model_type"] not in MAIN_TYPES:
        return None
    written = model_type_of(native["model_type"]).layout
    kinds = {key: types for key, (_, *types) in written["keys"].items()}
    values: Config = {**{key: default for key, (default, *_) in written["keys"].items()}, **native}
    if not _is_usual(native, values, kinds):
        return None
    for key, value in (
        ("head_dim", values["hidden_size"] // values["num_attention_heads"]),
        ("num_key_value_heads", values["num_attention_heads"]),
    ):
        if values.get(key) is None:
            values[key] = value
    num_layers, heads, d = values["num_hidden_layers"], values["num_attention_heads"], values["head_dim"]
    if d % 2 or heads % values["num_key_value_heads"]:
        return None
    implied = _implied_types(values)
    if values.get(_TYPES) is None:
        values[_TYPES] = implied
    types = values[_TYPES]
    if types is not None and len(types) != num_layers:
        return None
    sizes = {**values, "queries": heads * d, "keys": values["num_key_value_heads"] * d}

    def shape(dimensions: list[str]) -> Shape:
        return tuple(sizes[dimension] for dimension in dimensions)

    layer = {
        name: LayerTensor(role, shape(dimensions), offset)
        for name, (role, dimensions, offset, condition) in written["layer"].items()
        if condition is None or values[condition]
    }
    tied = {name: shape(written["outer"][name]) for name in written["tied"] if values["tie_word_embeddings"]}
    return {
        "config": SimpleNamespace(**values),
        "layers": [layer] * num_layers,
        "implied_types": implied,
        "outer": {name: shape(dimensions) for name, dimensions in written["outer"].items() if name not in tied},
        "tied": tied,
        "settings": tuple(
            {_TYPES: each} for each in types or [""] * num_layers
        ),  # nothing else changes what a layer computes
        "expert_layers": frozenset(),
        "buffers": frozenset(),
        "is_converted": False,
    }


def _is_usual(native: Config, values: Config, kinds: dict[str, list[str]]) -> bool:
    """Return whether a config has no value that the row does not cover, or that transformers might refuse."""
    num_layers, pad = values["num_hidden_layers"], values.get("pad_token_id")
    period = native.get(_PERIOD_KEY, 1)
    activations = [values[key] for key in ("hidden_act", "hidden_activation") if key in kinds]
    ropes = [native.get("rope_scaling"), native.get("rope_parameters")]
    if native["model_type"] == "gemma3_text" and isinstance(ropes[1], dict):
        if not ropes[1].keys() <= _NESTED_ROPE:
            return False
        ropes = [ropes[0], *ropes[1].values()]
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
        and all(activation in _ACTIVATIONS for activation in activations)
        and all(native.get(key) in _DTYPES for key in ("dtype", "torch_dtype"))
        and all(
            _is_number(native.get(key, 1)) for key in ("rope_theta", "rope_local_base_freq", "partial_rotary_factor")
        )
        and all(map(_is_usual_rope, ropes))
    )


def _is_usual_rope(rope: Any) -> bool:
    if rope is None:
        return True
    if not isinstance(rope, dict):
        return False
    numbers = {key: value for key, value in rope.items() if key not in ("type", "rope_type")}
    kind = rope.get("rope_type", rope.get("type", "default"))
    return (
        isinstance(kind, str)
        and kind in _ROPE_NEEDS
        and _ROPE_NEEDS[kind] <= numbers.keys()
        and all(map(_is_number, numbers.values()))
    )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and value > 0


def _implied_types(values: Config) -> list[str] | None:
    """Return the types of layers if a config lists none; None if the family has no types."""
    if "max_window_layers" in values and values["model_type"].startswith("qwen"):
        slides = values["use_sliding_window"] and values["sliding_window"] is not None
        first = values["max_window_layers"] if slides else values["num_hidden_layers"]
        sliding = [layer >= first for layer in range(values["num_hidden_layers"])]
    elif values["model_type"] in _PERIODS:
        period = _PERIODS[values["model_type"]]
        if values["model_type"] == "gemma3_text":
            period = values.get(_PERIOD_KEY, period)
        sliding = [(layer + 1) % period > 0 for layer in range(values["num_hidden_layers"])]
    else:
        return None
    return ["sliding_attention" if slides else "full_attention" for slides in sliding]

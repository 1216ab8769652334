"""Values of a config that describe single layers: lists with a value per layer, lists of layer indices, counts of leading layers."""

from collections.abc import Mapping
from typing import Any

from midus_hf.config.errors import RequestError

# Names of lists with one entry per layer, at the top of a config or inside its mappings: their entries follow the
# plan.
PER_LAYER_KEYS = frozenset(
    {
        "layer_types", "layer_rope_theta", "mlp_layer_types", "no_rope_layers", "num_attention_heads_per_layer",
        "indexer_types",
    }
)  # fmt: skip

# Names of lists of layer indices: each index is replaced by the indices that the layer has in the upscaled model.
LAYER_INDEX_KEYS = frozenset({"mlp_only_layers", "moe_layers", "full_attn_idxs", "attn_layer_indices"})

# Names of mappings by layer index, with entries for some layers: each entry follows its layer.
PER_LAYER_MAPPING_KEYS = frozenset({"per_layer_config"})

# Names of indices that separate leading layers from the others, each with what must be added to it for the number of leading
# layers: layers before a mixture of experts, or up to the last one.
LEADING_LAYERS_KEYS = {
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
    "moe_layer_start_index": 0,
    "moe_layer_end_index": 1,
}

# Name of the number of last layers that reuse keys and values of earlier layers.
SHARED_LAYERS_KEY = "num_kv_shared_layers"

# Names of values that never describe single layers of the base, whatever their length, or that other code updates.
NOT_PER_LAYER_KEYS = frozenset(
    {
        "architectures", "bos_token_id", "eos_token_id", "pad_token_id", "bad_words_ids", "suppress_tokens",
        "begin_suppress_tokens", "forced_decoder_ids", "id2label", "label2id", "long_factor", "short_factor", "mrope_section",
        "memory", "upscale", "quantization_config",
    }
)  # fmt: skip


def check_list(key: str, values: list[Any], num_layers: int, path: str | None = None) -> None:
    """Check that a list which describes single layers fits the number of layers; other lists are ignored.

    Args:
        key: Name of the list.
        values: The list.
        num_layers: L, the number of layers.
        path: Path that leads to the list from the top of the config. Default: the name.

    Raises:
        RequestError: If there is not one value per layer, or a layer that the model does not have.
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
    """Check, as `check_list` does, the lists of a config whose model could not be built or lacks tensors: they may be why.

    Raises:
        RequestError: If a list does not fit the number of layers.
    """
    num_layers = config.get("num_hidden_layers")
    for key, values in config.items():
        if isinstance(num_layers, int) and isinstance(values, list):
            check_list(key, values, num_layers)


def per_layer_lists(values: Mapping[str, Any], num_layers: int) -> dict[str, list[Any]]:
    """Return the lists among a config's values that describe single layers, by key.

    Args:
        values: Values of a config as transformers resolved it, with the lists that config.json leaves out.
        num_layers: L, the number of layers.
    """
    return {
        key: value
        for key, value in values.items()
        if isinstance(value, list)
        and key not in NOT_PER_LAYER_KEYS
        and (key in LAYER_INDEX_KEYS or len(value) == num_layers)
    }

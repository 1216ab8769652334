"""The table of families, and the family of a config.

Everything in the table is read from the raw `config.json`, so planning an upscaling of its families loads neither torch nor
transformers.
"""

from collections.abc import Callable
from typing import Literal

from midus_hf.config.backbone import FAMILY_TRAITS, MEMORY_PREFIX
from midus_hf.config.plugins import load_offered
from upscalers.architecture.family import Config, Family, positive
from upscalers.architecture.inferred import inferred_family
from upscalers.request.errors import RequestError, refusing_requests


def _qwen_layer_types(config: Config) -> list[str]:
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    first_sliding = config.get("max_window_layers", 28)
    if type(first_sliding) is not int:
        raise RequestError(
            f"config.json has max_window_layers = {first_sliding!r}; expected an integer. Repair the base checkpoint."
        )
    return [
        "sliding_attention" if window is not None and layer >= first_sliding else "full_attention"
        for layer in range(positive(config, "num_hidden_layers"))
    ]


def _gemma2_layer_types(config: Config) -> list[str]:
    return [
        "full_attention" if layer % 2 else "sliding_attention"
        for layer in range(positive(config, "num_hidden_layers"))
    ]


def _gemma3_layer_types(config: Config) -> list[str]:
    period = positive({"sliding_window_pattern": 6, **config}, "sliding_window_pattern")
    return [
        "sliding_attention" if (layer + 1) % period else "full_attention"
        for layer in range(positive(config, "num_hidden_layers"))
    ]


# Rows and columns of the blocks in FP8 that transformers assumes where a config does not say them.
_FP8_BLOCK = (128, 128)

# The middle part of the names of classes, and the function that returns the types of layers, by `model_type`.
_CLASSES_AND_TYPES: dict[str, tuple[str, Callable[[Config], list[str]] | None]] = {
    "llama": ("Llama", None),
    "qwen2": ("Qwen2", _qwen_layer_types),
    "qwen3": ("Qwen3", _qwen_layer_types),
    "gemma2": ("Gemma2", _gemma2_layer_types),
    "gemma3_text": ("Gemma3", _gemma3_layer_types),
    "mistral": ("Mistral", None),
    "olmo2": ("Olmo2", None),
}

FAMILIES: dict[str, Family] = {
    model_type: Family(
        model_type=model_type, class_name=class_name, layer_types=layer_types, **vars(FAMILY_TRAITS[model_type])
    )
    for model_type, (class_name, layer_types) in _CLASSES_AND_TYPES.items()
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
        RequestError: If no family has the config's model type, or the model is quantised or brings code of its publisher.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise RequestError(
            f"config.json has model_type = {model_type!r}; expected one of: {', '.join(FAMILIES)}. Restore the config.json that "
            "the base was published with."
        )
    check_readable(config)
    native_type = model_type.removeprefix(MEMORY_PREFIX)
    if native_type not in FAMILIES:
        with refusing_requests():
            load_offered("upscalers.families")
    if native_type not in FAMILIES:
        return inferred_family(native_type)
    return FAMILIES[native_type]


def check_readable(config: Config) -> None:
    """Refuse a model whose weights are quantised, or that brings code of its publisher.

    Raises:
        RequestError: If the config says so.
    """
    native_type = str(config.get("model_type")).removeprefix(MEMORY_PREFIX)
    quantization = config.get("quantization_config")
    if quantization:
        form = quantised_form(config)
        if form == "fp8":
            fp8_block(config)
        if not (form == "mxfp4" or (form == "fp8" and native_type in FAMILIES)):
            method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
            raise RequestError(
                f"the base is quantised (quantization_config: {method}); expected float32, float16 or bfloat16 weights, or "
                f"FP8 with a scale per block or weight in one of: {', '.join(FAMILIES)}; or MXFP4 in gpt_oss. Start from the "
                "unquantised checkpoint."
            )
    if config.get("auto_map") and not str(config.get("model_type")).startswith(MEMORY_PREFIX):
        raise RequestError(
            "the base brings code of its own (auto_map in config.json), which is never run; expected a native checkpoint. "
            "If its weights are those of the native class, remove auto_map from config.json."
        )


def quantised_form(config: Config) -> Literal["fp8", "mxfp4"] | None:
    """Return the form of quantised weights that `upscale` reads: FP8 with a scale per block or weight, or MXFP4 in gpt_oss."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        return None
    if quantization.get("quant_method") == "mxfp4" and str(config.get("model_type")).endswith("gpt_oss"):
        return "mxfp4"
    is_read = (
        quantization.get("quant_method") == "fp8"
        and quantization.get("activation_scheme", "dynamic") == "dynamic"
        and quantization.get("scale_fmt", "float") in ("float", None)
        and not quantization.get("modules_to_convert")
    )
    return "fp8" if is_read else None


def fp8_block(config: Config) -> tuple[int, int] | None:
    """Return rows and columns of the blocks that share a scale, as transformers reads the config of a model in FP8.

    Returns:
        The size of a block; None where a weight has one scale.

    Raises:
        RequestError: If the config has no such size.
    """
    block = config["quantization_config"].get("weight_block_size", _FP8_BLOCK)
    if block is None:
        return None
    if not (
        isinstance(block, list | tuple) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    ):
        raise RequestError(
            f"quantization_config has weight_block_size = {block!r}; expected rows and columns, such as [128, 128], or null for one "
            "scale per weight. Restore the config.json that the base was published with."
        )
    return block[0], block[1]

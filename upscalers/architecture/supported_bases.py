"""Which bases are supported: the family of a config, and the formats of quantised weights."""

from typing import Literal

from midus_hf.anatomy.types import MAIN_TYPES, MEMORY_PREFIX, ModelType, model_type_of
from midus_hf.config.errors import RequestError
from upscalers.architecture.layer_tensors import Config

# Block size in FP8 that transformers assumes if a config has none.
_FP8_BLOCK = (128, 128)


def family_of(config: Config) -> ModelType:
    """Return the type of the model that a config describes, whether or not the model already hosts memory.

    Raises:
        RequestError: If the type cannot host memory or was not proven, or the model is quantised or has custom code.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise RequestError(
            f"config.json has model_type = {model_type!r}; expected one of: {', '.join(MAIN_TYPES)}. Restore the config.json that "
            "the base was published with."
        )
    check_readable(config)
    return model_type_of(model_type)


def check_readable(config: Config) -> None:
    """Refuse a model whose weights are quantised, or that has custom code.

    Raises:
        RequestError: If the config says so.
    """
    native_type = str(config.get("model_type")).removeprefix(MEMORY_PREFIX)
    quantization = config.get("quantization_config")
    if quantization:
        form = quantised_form(config)
        if form == "fp8":
            fp8_block(config)
        if not (form == "mxfp4" or (form == "fp8" and native_type in MAIN_TYPES)):
            method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
            raise RequestError(
                f"the base is quantised (quantization_config: {method}); expected float32, float16 or bfloat16 weights, or "
                f"FP8 with a scale per block or weight in one of: {', '.join(MAIN_TYPES)}; or MXFP4 in gpt_oss. Start from the "
                "unquantised checkpoint."
            )
    if config.get("auto_map") and not str(config.get("model_type")).startswith(MEMORY_PREFIX):
        raise RequestError(
            "the base has custom code (auto_map in config.json), which is never run; expected a native checkpoint. "
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

"""Quantised checkpoints that can be upscaled."""

from upscalers.architecture.family import Config


def has_block_scales(config: Config) -> bool:
    """Return whether a config says that weights are FP8 with scales per block, in the form that `upscale` reads."""
    quantization = config.get("quantization_config")
    return (
        isinstance(quantization, dict)
        and quantization.get("quant_method") == "fp8"
        and bool(quantization.get("weight_block_size"))
        and quantization.get("activation_scheme", "dynamic") == "dynamic"
        and quantization.get("scale_fmt", "float") in ("float", None)
        and not quantization.get("modules_to_convert")
    )


def has_packed_experts(config: Config) -> bool:
    """Return whether a config says that experts are in MXFP4, as gpt-oss stores them."""
    quantization = config.get("quantization_config")
    return (
        isinstance(quantization, dict)
        and quantization.get("quant_method") == "mxfp4"
        and str(config.get("model_type")).endswith("gpt_oss")
    )

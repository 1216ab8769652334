"""Which bases are supported: the family of a config, and why others are refused."""

from midus_hf.anatomy.types import MAIN_TYPES, MEMORY_PREFIX, ModelType, model_type_of
from midus_hf.config.errors import RequestError
from upscalers.architecture.layer_tensors import Config

# Configs of Transformers that dequantise weights as they are loaded, by `quant_method`.
_DEQUANTISING = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}


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
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        remedy = "Start from the unquantised checkpoint."
        if method in _DEQUANTISING:
            remedy = (
                "Dequantise it first, in Python: AutoModelForCausalLM.from_pretrained(BASE, dtype='auto', quantization_config="
                f"{_DEQUANTISING[method]}(dequantize=True)).save_pretrained('base'), and its AutoTokenizer likewise."
            )
        raise RequestError(
            f"the base is quantised (quantization_config: {method or 'unknown'}); expected float32, float16 or bfloat16 weights. "
            f"{remedy}"
        )
    if config.get("auto_map") and not str(config.get("model_type")).startswith(MEMORY_PREFIX):
        raise RequestError(
            "the base has custom code (auto_map in config.json), which is never run; expected a native checkpoint. "
            "If its weights are those of the native class, remove auto_map from config.json."
        )

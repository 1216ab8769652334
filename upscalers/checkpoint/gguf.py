"""GGUF files as bases: read tensor by tensor, or converted to checkpoints."""

from pathlib import Path
from typing import Any

from upscalers.checkpoint.gguf_weights import GgufWeights, open_gguf
from upscalers.request.errors import RequestError, one_line


def read_gguf(path: Path, folder: Path) -> GgufWeights | None:
    """Return the weights of a GGUF file, which are dequantised to float32 whenever they are read, and write all else to a folder.

    Where a tensor of the model is not made from one tensor of the file, the whole checkpoint is written, as by
    `convert_gguf`.

    Args:
        path: The `.gguf` file.
        folder: An existing folder that config and tokenizer are written to.

    Returns:
        The weights; None if they are in the folder.

    Raises:
        RequestError: If the gguf package is missing, or transformers cannot read the file.
    """
    _check_package(path)
    try:
        weights = open_gguf(path, folder)
    except Exception as error:
        raise _unreadable(path, error) from None
    if weights is None:
        convert_gguf(path, folder)
    return weights


def convert_gguf(path: Path, folder: Path, config_only: bool = False) -> None:
    """Dequantise a GGUF file to a float32 checkpoint with its tokenizer, through transformers' loader.

    Args:
        path: The `.gguf` file.
        folder: An existing folder that the checkpoint is written to.
        config_only: Whether to write only `config.json`, from the file's header. Default: False.

    Raises:
        RequestError: If the gguf package is missing, or transformers cannot read the file.
    """
    _check_package(path)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    try:
        if config_only:
            AutoConfig.from_pretrained(**source).save_pretrained(folder)
            return
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except Exception as error:
        raise _unreadable(path, error) from None
    # The loader leaves its quantiser on the dequantised model, and a model with a quantiser refuses to be saved.
    for attribute in ("hf_quantizer", "quantization_method", "is_quantized"):
        if hasattr(model, attribute):
            delattr(model, attribute)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _check_package(path: Path) -> None:
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise RequestError(
            f"base {path.name} is a GGUF file; expected the gguf package. Install midus-hf[gguf]."
        ) from None


def _unreadable(path: Path, error: Exception) -> RequestError:
    return RequestError(
        f"transformers cannot read {path.name} ({type(error).__name__}: {one_line(error)}). Download it again, or give the "
        "safetensors checkpoint it was made from."
    )

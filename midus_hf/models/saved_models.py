"""Loading of saved models, for all commands."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from midus_hf.config.errors import RequestError, as_request_error
from midus_hf.files.checkpoint_files import ADAPTERS, BANKS_FOLDER, CONFIG, GLOSSARY_FILE, WEIGHTS, refuse_lfs_pointers
from midus_hf.sources.downloads import fetching
from midus_hf.sources.names import check_dtype, usable_device
from midus_hf.sources.progress import limit_bars
from midus_hf.sources.tokenizers import load_tokenizer, without_suffix_tokens


def load_model(
    name: str, dtype: str = "auto", trust_remote_code: bool = False, **options: Any
) -> tuple[PreTrainedModel, list[str]]:
    """Load a language model, and return it with the sorted names of the tensors that its checkpoint lacks."""
    refuse_lfs_pointers(Path(name), CONFIG, WEIGHTS, ADAPTERS, (GLOSSARY_FILE, f"{BANKS_FOLDER}/*/*"))
    file_options = {key: options[key] for key in _DOWNLOAD_OPTIONS if key in options}
    with fetching(name):
        config = options.get("config") or AutoConfig.from_pretrained(
            name, trust_remote_code=trust_remote_code, **file_options
        )
        loaded: Any = auto_class_of(config).from_pretrained(
            name, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True, **options
        )
    model, loading = loaded
    return model, sorted(loading["missing_keys"])


def auto_class_of(config: Any) -> Any:
    """Return the Auto class of transformers that loads all parts of a model."""
    if config.get_text_config(decoder=True) is config:
        return AutoModelForCausalLM
    auto_map = getattr(config, "auto_map", None) or {}
    for auto_class, mapping in (
        (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
        (AutoModelForMultimodalLM, MODEL_FOR_MULTIMODAL_LM_MAPPING),
    ):
        if type(config) in mapping or auto_class.__name__ in auto_map:
            return auto_class
    return AutoModelForCausalLM


# Options of `from_pretrained` that say where files are.
_DOWNLOAD_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download", "subfolder")


def check_no_missing_tensors(name: str, missing: list[str], label: str = "model") -> None:
    """Refuse a model whose checkpoint lacks tensors, since these tensors would be random."""
    if missing:
        raise RequestError(
            f"{label} is {name!r}, whose checkpoint lacks {len(missing)} of its tensors, such as {missing[0]}, which would be "
            "random; expected a whole checkpoint. Make it again."
        )


def load_for_reading(
    name: str, dtype: str, device: str | None, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model, in eval mode, and its tokenizer, without an end token after texts."""
    check_dtype(dtype)
    usable = usable_device(device)
    unloaded = f"model is {name!r}, which cannot be loaded on {usable}"
    with as_request_error(unloaded, OSError, RuntimeError, ValueError), limit_bars():
        tokenizer = load_tokenizer(name, trust_remote_code)
        model, missing = load_model(name, dtype, trust_remote_code)
        model.to(torch.device(usable))  # type: ignore[arg-type]  # transformers' wrapper hides the argument
    check_no_missing_tensors(name, missing)
    return model.eval(), without_suffix_tokens(tokenizer)

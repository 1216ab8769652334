"""Loading of saved models and their tokenizers, for all commands."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import processors
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from midus_hf.config.errors import RequestError, as_request_error
from midus_hf.files.checkpoint_files import ADAPTERS, CONFIG, TOKENIZER, WEIGHTS, refuse_lfs_pointers
from midus_hf.library_bars import limit_bars
from midus_hf.memories.bank import bank_patterns
from midus_hf.model_names import check_dtype, usable_device


def load_tokenizer(name: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer saved with a model; errors of transformers are raised unchanged."""
    refuse_lfs_pointers(Path(name), TOKENIZER)
    return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)


def open_ended(tokenizer: Any) -> Any:
    """Return a tokenizer for texts to be continued: the one given, or a copy that does not append special tokens to texts.

    Raises:
        RequestError: If it is not a fast one, and they cannot be left out.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return _slow_open_ended(tokenizer)
    state = json.loads(backend.post_processor.__getstate__()) if backend.post_processor is not None else {}
    opened = _without_end(state)
    if opened == state:
        return tokenizer
    processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    processor.__setstate__(json.dumps(opened).encode())
    copied = copy.deepcopy(tokenizer)
    copied.backend_tokenizer.post_processor = processor
    return copied


def _without_end(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a post-processor of tokenizers that appends nothing to a text."""
    if "processors" in state:
        return {**state, "processors": [*map(_without_end, state["processors"])]}
    if "single" in state:
        last = max((at for at, part in enumerate(state["single"]) if "Sequence" in part), default=-1)
        return {**state, "single": state["single"][: last + 1]}
    if "sep" in state:  # of BERT and RoBERTa
        (name, number), template = state["cls"], processors.TemplateProcessing
        return json.loads(template(single=f"{name} $A", special_tokens=[(name, number)]).__getstate__())
    return state


def _slow_open_ended(tokenizer: Any) -> Any:
    framed = tokenizer.build_inputs_with_special_tokens
    if framed([-1])[-1] == -1:  # a text
        return tokenizer
    copied = copy.deepcopy(tokenizer)
    copied.add_eos_token = False
    if copied.build_inputs_with_special_tokens([-1])[-1] != -1:
        raise RequestError(
            f"the tokenizer puts {tokenizer.decode(framed([-1])[-1:])!r} behind every text, so that no text can go on; expected one "
            "without it. Set add_eos_token to false in its tokenizer_config.json."
        )
    return copied


def beginning_of(tokenizer: Any) -> list[int]:
    """Return the ids that a tokenizer puts before every text: those of no token, of BOS, or of several tokens.

    Packed sequences and the rows of evaluations begin with them, wherever in a text they begin.
    """
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        framed = tokenizer.build_inputs_with_special_tokens([-1])
        return framed[: framed.index(-1)]
    ids: list[int] = open_ended(tokenizer)("", verbose=False)["input_ids"]
    return ids


def check_ids(largest: int, vocab_size: int) -> None:
    """Check that a model embeds every id that a tokenizer yields."""
    if largest >= vocab_size:
        raise RequestError(
            f"the tokenizer yields id {largest}, but the model embeds {vocab_size} ids; "
            "use the tokenizer that the model was made with."
        )


def load_model(
    name: str, dtype: str = "auto", trust_remote_code: bool = False, **options: Any
) -> tuple[PreTrainedModel, list[str]]:
    """Load a language model, and return it with the sorted names of the tensors that its checkpoint lacks."""
    refuse_lfs_pointers(Path(name), CONFIG, WEIGHTS, ADAPTERS, bank_patterns())
    file_options = {key: options[key] for key in _OF_FILES if key in options}
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
_OF_FILES = ("revision", "token", "cache_dir", "local_files_only", "force_download", "subfolder")


def check_whole(name: str, missing: list[str], label: str = "model") -> None:
    """Refuse a model whose checkpoint lacks tensors, since these tensors would be random."""
    if missing:
        raise RequestError(
            f"{label} is {name!r}, whose checkpoint lacks {len(missing)} of its tensors, such as {missing[0]}, which would be "
            "random; expected a whole checkpoint. Make it again."
        )


def load_for_reading(
    name: str, dtype: str, device: str | None, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model, in eval mode, and its tokenizer, without an end token after texts. Bars are shown only on terminals."""
    check_dtype(dtype)
    usable = usable_device(device)
    unloaded = f"model is {name!r}, which cannot be loaded on {usable}"
    with as_request_error(unloaded, OSError, RuntimeError, ValueError), limit_bars():
        tokenizer = load_tokenizer(name, trust_remote_code)
        model, missing = load_model(name, dtype, trust_remote_code)
        model.to(torch.device(usable))  # type: ignore[arg-type]  # transformers' wrapper hides the argument
    check_whole(name, missing)
    return model.eval(), open_ended(tokenizer)

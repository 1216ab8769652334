"""Tokenizers of saved models, and what they put around texts."""

import copy
import json
from pathlib import Path
from typing import Any

from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from midus_hf.config.errors import RequestError
from midus_hf.files.checkpoint_files import TOKENIZER, refuse_lfs_pointers
from midus_hf.sources.downloads import fetching


def load_tokenizer(name: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer saved with a model; errors of transformers are raised unchanged."""
    refuse_lfs_pointers(Path(name), TOKENIZER)
    with fetching(f"the tokenizer of {name}"):
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)


def without_suffix_tokens(tokenizer: Any) -> Any:
    """Return a tokenizer for texts to be continued: itself, or a copy that appends no special tokens.

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
        name, number = state["cls"]
        template = processors.TemplateProcessing
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


def prefix_ids(tokenizer: Any) -> list[int]:
    """Return the ids, if any, that a tokenizer puts before every text; packed sequences begin with them."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        framed = tokenizer.build_inputs_with_special_tokens([-1])
        return framed[: framed.index(-1)]
    ids: list[int] = without_suffix_tokens(tokenizer)("", verbose=False)["input_ids"]
    return ids


def check_ids(largest: int, vocab_size: int) -> None:
    """Check that a model embeds every id that a tokenizer yields."""
    if largest >= vocab_size:
        raise RequestError(
            f"the tokenizer yields id {largest}, but the model embeds {vocab_size} ids; "
            "use the tokenizer that the model was made with."
        )

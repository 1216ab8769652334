"""Tokenizer of an upscaled model, which must read text as the base's does."""

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from midus_hf.config.wording import first_line
from upscalers.request.errors import VerificationError
from upscalers.request.progress import Progress

TOKENIZER_CONFIG = "tokenizer_config.json"
_FILES = ("tokenizer.json", "tokenizer.model", TOKENIZER_CONFIG, "vocab.json", "vocab.txt")
_TEXT = "The 1st of 2,048 naïve   tests:\n\tit's x=3.14 — “quoted”, 東京, don't!"


def has_tokenizer(names: Iterable[str]) -> bool:
    """Return whether a checkpoint with files of these names has a tokenizer."""
    return not {*_FILES}.isdisjoint(names)


def keep_tokenizer_class(base_folder: Path, folder: Path, progress: Progress) -> bool:
    """Name the tokenizer's class in the upscaled folder where `AutoTokenizer`, which goes by `model_type`, would choose another."""
    if not has_tokenizer(path.name for path in folder.iterdir() if path.is_file()):
        return False
    from transformers import AutoTokenizer

    load = partial(AutoTokenizer.from_pretrained, local_files_only=True, trust_remote_code=False)
    try:
        base = load(base_folder)
        expected = base(_TEXT)["input_ids"]
    except MemoryError:
        raise
    except Exception as error:  # the package tokenizers raises plain Exceptions
        is_code = isinstance(error, ValueError) and "trust_remote_code=True" in str(error)
        reason = "it is code of its publisher, which is never run" if is_code else first_line(error).rstrip(".")
        progress.warn(f"the base's tokenizer does not work here ({reason}); its files are copied unchanged.")
        return False
    changed = type(load(folder)) is not type(base)
    if changed:
        path = folder / TOKENIZER_CONFIG
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        config["tokenizer_class"] = type(base).__name__
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    new = load(folder)
    if new(_TEXT)["input_ids"] != expected:
        raise VerificationError(
            f"the upscaled model's tokenizer ({type(new).__name__}) reads a text otherwise than the base's "
            f"({type(base).__name__}); expected the same ids."
        )
    return changed

"""Tokenizer of an upscaled model, which must read text as the base's does."""

import json
from collections.abc import Iterable
from pathlib import Path

from upscalers.request.errors import VerificationError

TOKENIZER_CONFIG = "tokenizer_config.json"
_FILES = ("tokenizer.json", "tokenizer.model", TOKENIZER_CONFIG, "vocab.json", "vocab.txt")
_TEXT = "The 1st of 2,048 naïve   tests:\n\tit's x=3.14 — “quoted”, 東京, don't!"


def has_tokenizer(names: Iterable[str]) -> bool:
    """Return whether a checkpoint with files of these names has a tokenizer."""
    return not {*_FILES}.isdisjoint(names)


def keep_tokenizer_class(base_folder: Path, folder: Path) -> bool:
    """Name the tokenizer class in the upscaled folder where `AutoTokenizer` would otherwise choose another class.

    For some families `AutoTokenizer` chooses by `model_type`, whatever the files say, and a new `model_type` is
    unknown to it.

    Args:
        base_folder: Folder of the base.
        folder: Folder of the upscaled checkpoint, in which config and tokenizer files are already written.

    Returns:
        Whether `tokenizer_config.json` was changed.

    Raises:
        VerificationError: If a text becomes other ids nevertheless.
    """
    if not has_tokenizer(path.name for path in folder.iterdir() if path.is_file()):
        return False
    from transformers import AutoTokenizer

    try:
        base = AutoTokenizer.from_pretrained(base_folder, local_files_only=True)
        expected = base(_TEXT)["input_ids"]
    except Exception:
        return False  # The base's own tokenizer does not load or run: its files are copied unchanged.
    changed = False
    if type(AutoTokenizer.from_pretrained(folder, local_files_only=True)) is not type(base):
        path = folder / TOKENIZER_CONFIG
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        config["tokenizer_class"] = type(base).__name__
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        changed = True
    new = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if new(_TEXT)["input_ids"] != expected:
        raise VerificationError(
            f"the upscaled model's tokenizer ({type(new).__name__}) reads a text otherwise than the base's "
            f"({type(base).__name__}); expected the same ids."
        )
    return changed

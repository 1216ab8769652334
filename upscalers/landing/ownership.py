"""Which folders `--overwrite` may delete: what this package wrote, and nothing that a person put beside it."""

import json
import re
from pathlib import Path
from typing import Any

from midus_config.fetched_blocks import BANKS_FOLDER
from upscalers.checkpoint.banks import bank_files
from upscalers.checkpoint.source import travelling_files
from upscalers.record.provenance import CONFIG_KEY, RECORD_FILE, has_config_entry, is_record
from upscalers.request.errors import RequestError

_CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_WEIGHTS = re.compile(r"model(-\d+(-of-\d+)?)?\.safetensors")
_CODE = re.compile(r"(modeling_midus|midus_\w+)\.py")
_OF_TRAINING = frozenset({"training_args.bin", "trainer_state.json", "train_config.yaml", "log.jsonl"})
"""What a Trainer and `midus-train` put beside a model. Checkpoints to resume from are not among it: they are a run."""
_OTHERS = frozenset({_CONFIG, _INDEX, RECORD_FILE, "README.md", ".gitattributes", *_OF_TRAINING})
_TEMPLATES, _DOWNLOAD = "additional_chat_templates", (".cache", "huggingface")
_LISTED = 4


def check_replaceable(folder: Path) -> None:
    """Check that nothing of a person's is lost with a folder: that it is empty, or a checkpoint of ours and no more.

    Raises:
        RequestError: If it is not; names what would be lost.
    """
    if not folder.is_dir() or (
        any(folder.iterdir()) and not any((folder / f).exists() for f in (_CONFIG, RECORD_FILE))
    ):
        raise RequestError(
            f"output {folder} is no checkpoint (it has no {_CONFIG}), so --overwrite will not delete it. "
            "Choose another folder."
        )
    foreign = foreign_files(folder)
    if not _is_ours(folder):
        besides = f", and it holds {listed(foreign)}" if foreign else ""
        raise RequestError(
            f"output {folder} was not written by upscale or strip, so --overwrite will not delete it: its {_CONFIG} has no "
            f"{CONFIG_KEY!r} entry, it has no {RECORD_FILE} of theirs{besides}. Choose another folder, or remove it yourself."
        )
    if foreign:
        raise RequestError(
            f"output {folder} holds what no checkpoint has, and --overwrite would delete it: {listed(foreign)}; expected nothing "
            "but weights, config, tokenizer, licence, model card and exported code. Move it, or choose another folder."
        )


def is_replaceable(folder: Path) -> bool:
    """Whether `check_replaceable` lets a folder pass."""
    try:
        check_replaceable(folder)
    except RequestError:
        return False
    return True


def foreign_files(folder: Path) -> list[str]:
    """What a folder holds that no checkpoint has, sorted; a folder that does not belong there stands for all in it."""
    travelling, of_banks = set(travelling_files(folder)), bank_files(folder)
    weights = _indexed_files(folder)

    def belongs(path: Path) -> bool:
        return path in travelling or (
            path.is_file()
            and (
                path.name in _OTHERS
                or path.name in weights
                or _WEIGHTS.fullmatch(path.name) is not None
                or _CODE.fullmatch(path.name) is not None
            )
        )

    found: list[str] = []
    for path in folder.iterdir():
        if path.is_dir() and path.name in (_TEMPLATES, _DOWNLOAD[0]):
            inside = (inner for inner in path.iterdir() if inner not in travelling and not _is_download(inner))
            found += [_name(inner, folder) for inner in inside]
        elif path.is_dir() and path.name == BANKS_FOLDER:
            found += [_name(inner, folder) for inner in path.rglob("*") if inner.is_file() and inner not in of_banks]
        elif not belongs(path):
            found.append(_name(path, folder))
    return sorted(found)


def code_files(folder: Path) -> list[Path]:
    """The code that a checkpoint carries along, sorted."""
    return sorted(path for path in folder.glob("*.py") if path.is_file() and _CODE.fullmatch(path.name))


def listed(names: list[str]) -> str:
    """The first few of some names, and how many there are beyond them."""
    beyond = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {beyond} more" if beyond > 0 else "")


def _name(path: Path, folder: Path) -> str:
    return f"{path.relative_to(folder)}{'/' if path.is_dir() else ''}"


def _is_download(path: Path) -> bool:
    """Whether the hub's client keeps its notes there about what it downloaded."""
    return path.parts[-2:] == _DOWNLOAD and path.is_dir()


def _indexed_files(folder: Path) -> set[str]:
    """Files that an index names as shards: `strip` gives a base's own names back, whatever they are."""
    index = _read_object(folder / _INDEX)
    weight_map = index.get("weight_map") if index else None
    values = weight_map.values() if isinstance(weight_map, dict) else ()
    return {name for name in values if isinstance(name, str) and name.endswith(".safetensors")}


def _is_ours(folder: Path) -> bool:
    config, record = _read_object(folder / _CONFIG), _read_object(folder / RECORD_FILE)
    return not any(folder.iterdir()) or (config is not None and has_config_entry(config)) or is_record(record)


def _read_object(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None

"""Decides which folders `--overwrite` may delete: only folders in which this package wrote everything."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from midus_hf.config.fetched_blocks import BANKS_FOLDER
from midus_hf.config.wording import first_few
from midus_hf.files.checkpoint_files import (
    CONFIG_FILE,
    DOWNLOADS,
    OF_UPSCALED,
    RECORD_FILE,
    TEMPLATES_FOLDER,
    indexed_weights,
    is_of,
    named_code,
)
from midus_hf.files.json_text import parse_json

# Entry of a config that describes how the model was made.
CONFIG_KEY = "upscale"

# Key of the language model's config within the config of a larger model.
LANGUAGE_KEY = "text_config"

# Entry of a record that says that the new parts were removed.
STRIPPED_KEY = "stripped"


def check_replaceable(folder: Path) -> None:
    """Check that a folder may be deleted: that it is empty, or holds a checkpoint of this package and nothing else.

    Raises:
        ValueError: If files of a person would be lost. The message names them.
    """
    if not folder.is_dir():
        raise ValueError(f"output {folder} is a file, so --overwrite will not delete it. Choose another path.")
    foreign = foreign_files(folder)
    config, record = _read_object(folder / CONFIG_FILE) or {}, _read_object(folder / RECORD_FILE) or {}
    has_record = "midus_hf" in record and ("plan" in record or STRIPPED_KEY in record)
    if any(folder.iterdir()) and not has_config_entry(config) and not has_record:
        besides = f", and it holds {first_few(foreign)}" if foreign else ""
        raise ValueError(
            f"output {folder} was not written by upscale or strip, so --overwrite will not delete it: its {CONFIG_FILE} has no "
            f"{CONFIG_KEY!r} entry, it has no {RECORD_FILE} of theirs{besides}. Choose another folder, or remove it yourself."
        )
    if foreign:
        raise ValueError(
            f"output {folder} holds what no checkpoint has, and --overwrite would delete it: {first_few(foreign)}; expected nothing "
            "but weights, config, tokenizer, licence, model card and exported code. Move it, or choose another folder."
        )


def foreign_files(folder: Path) -> list[str]:
    """Return the paths in a folder that no checkpoint has, sorted. A foreign folder is listed without its contents."""
    weights, code = indexed_weights(folder), named_code(folder)

    def belongs(path: Path) -> bool:
        name = path.relative_to(folder)
        return path.is_file() and (is_of(name, OF_UPSCALED) or str(name) in weights or path in code)

    foreign: list[str] = []
    for path in folder.iterdir():
        if path.is_dir() and path.name in (TEMPLATES_FOLDER, DOWNLOADS.parts[0]):
            inside = (inner for inner in path.iterdir() if not belongs(inner) and not _is_download(inner, folder))
            foreign += [_name(inner, folder) for inner in inside]
        elif path.is_dir() and path.name == BANKS_FOLDER:
            foreign += [_name(inner, folder) for inner in path.rglob("*") if inner.is_file() and not belongs(inner)]
        elif not belongs(path):
            foreign.append(_name(path, folder))
    return sorted(foreign)


def language_entry(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a raw config that describes the language model: the config itself, unless the model is a larger one."""
    inner = config.get(LANGUAGE_KEY)
    return inner if isinstance(inner, Mapping) else config


def has_config_entry(config: Mapping[str, Any]) -> bool:
    """Return whether a config, or that of the language model within it, has the entry that `upscale` writes."""
    entry = language_entry(config).get(CONFIG_KEY)
    return isinstance(entry, dict) and {"method", "plan", "base_config", "new_layers"} <= entry.keys()


def _name(path: Path, folder: Path) -> str:
    return f"{path.relative_to(folder)}{'/' if path.is_dir() else ''}"


def _is_download(path: Path, folder: Path) -> bool:
    """Return whether a path is the folder in which the hub's client keeps notes about its downloads."""
    return path.relative_to(folder) == DOWNLOADS and path.is_dir()


def _read_object(path: Path) -> dict[str, Any] | None:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None

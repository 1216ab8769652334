"""Checks of a run's keys that need no libraries, so that mistakes are reported before torch and transformers are imported."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from midus_hf.anatomy.record import record_of
from midus_hf.config.wording import first_few
from midus_hf.model_names import check_column, check_sources, saved_config, small_columns

# Columns of the formats of `midus sft`, in the order in which they are tried.
FORMATS = (
    ("messages",),
    ("conversations",),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("instruction", "response"),
)

# Keys that name what a run reads.
SOURCES = (
    *("corpus", "tree", "dataset_name", "model_name_or_path", "config_name", "tokenizer_name"),
    *("eval_text", "protect"),
)
# The key of the data, by command.
_DATA = {"train": "corpus", "sft": "dataset_name"}


def check_early(command: str, keys: Mapping[str, Any]) -> None:
    """Reject invalid paths and models before heavy imports; values are as in YAML, None if not given."""
    check_data(_DATA[command], keys.get(_DATA[command]))
    if keys.get("model_name_or_path") is None and keys.get("config_name") is None:
        raise ValueError("config has no 'model_name_or_path'; set it in the recipe, or by --model.")
    sources = sources_of(keys)
    check_sources(sources)
    output = keys.get("output_dir")
    if isinstance(output, str):
        folder = Path(output).expanduser()
        check_folder(folder, sources)
        files = sorted(os.listdir(folder)) if folder.is_dir() else []
        if files and not keys.get("resume_from_checkpoint"):
            raise holds_files(folder, files)
    data = keys[_DATA[command]]
    if command == "train" and isinstance(data, str):
        check_column("corpus", data, keys.get("text_column") or "text")
    elif isinstance(data, str) and (columns := small_columns(data)) is not None:
        format_of(data, columns)
    if keys.get("trainable") in (None, "auto") and not keys.get("adapters"):
        _check_is_upscaled(str(keys.get("model_name_or_path")))


def _check_is_upscaled(name: str) -> None:
    """Refuse a model in a folder whose config has no record of `upscale`; a config that cannot be read is left to its loader."""
    try:
        config = saved_config(name)
    except ValueError:
        return
    if isinstance(config, dict) and config:
        if record_of(config) is None:
            raise nothing_new(config.get("text_config", config).get("model_type"))


def check_data(key: str, value: Any) -> None:
    if not value:
        raise ValueError(f"config has no {key!r}; set it in the recipe, or by --{key}.")


def sources_of(keys: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return all inputs of a run: the name of each key, with its path or id of a model or dataset."""
    sources: list[tuple[str, Any]] = []
    for key in SOURCES:
        value = keys.get(key)
        if isinstance(value, Mapping):
            sources += [(f"{key}.{name}", path) for name, path in value.items()]
        else:
            sources += [(key, path) for path in (value if isinstance(value, list) else [value])]
    return [(key, path) for key, path in sources if isinstance(path, str)]


def check_folder(output: Path, sources: Iterable[tuple[str, str]]) -> None:
    """Refuse an output that cannot be written, contains an input of the run, or is inside one."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"output_dir is {str(output)!r}, a file; expected a folder.")
    ancestor = next(folder for folder in (output.absolute(), *output.absolute().parents) if folder.exists())
    if not ancestor.is_dir() or not os.access(ancestor, os.W_OK):
        raise ValueError(
            f"output_dir is {str(output)!r}, but {str(ancestor)!r} is not a folder to write in; choose another."
        )
    for key, source in sources:
        if Path(source).exists():  # other names are ids of models or datasets
            for outer, inner, verb in ((output, Path(source), "holds"), (Path(source), output, "lies in")):
                if inner.resolve().is_relative_to(outer.resolve()):
                    raise ValueError(
                        f"output_dir is {str(output)!r}, which {verb} the {key} {source!r}; choose another folder."
                    )


def holds_files(output: Path, files: list[str]) -> ValueError:
    return ValueError(
        f"output_dir is {str(output)!r}, which holds {first_few(files)}; choose another folder, remove it, or set "
        "resume_from_checkpoint: true."
    )


def nothing_new(kind: str | None) -> ValueError:
    return ValueError(
        f"trainable is 'auto', and this {kind} model is a base, not an upscaled model: it has no new parameters. Upscale it first, "
        "set trainable: all to train the base itself, or set adapters, such as adapters: {r: 16}."
    )


def format_of(source: str, columns: list[str]) -> tuple[str, ...]:
    """Return the columns of the format of `midus sft` that rows with these columns have, or refuse them."""
    for expected in FORMATS:
        if set(expected) <= set(columns):
            return expected
    formats = "; ".join(", ".join(expected) for expected in FORMATS)
    raise ValueError(
        f"dataset_name is {source!r}, whose rows have {', '.join(columns) or 'nothing'}; expected the columns of a format "
        f"({formats}). Rename them."
    )

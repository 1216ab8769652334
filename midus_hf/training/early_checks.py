"""Checks of a run's keys that need no library, so that a mistake is told before torch and transformers are imported."""

import ast
import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

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
# The key of the data, by command, and the classes that have the keys of arguments: package, file and name.
_DATA = {"train": "corpus", "sft": "dataset_name"}
_SHARED = (
    ("midus_hf", "training/optim/rates.py", "Rates"),
    ("midus_hf", "training/arguments.py", "MemoryArguments"),
    ("transformers", "training_args.py", "TrainingArguments"),
)
_CLASSES = {
    "train": (*_SHARED, ("midus_hf", "training/arguments.py", "TrainArguments")),
    "sft": (
        *_SHARED,
        ("midus_hf", "training/sft/arguments.py", "SftArguments"),
        ("trl", "trainer/base_config.py", "_BaseConfig"),
        ("trl", "trainer/sft_config.py", "SFTConfig"),
    ),
}


# Keys with a range: what is right, and how messages say it.
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
        (lambda size: size >= 1, "at least 1"),
    ),
    "max_steps": (lambda steps: steps != 0, "more than 0, or -1 for num_train_epochs"),
    "num_train_epochs": (lambda epochs: epochs > 0, "more than 0"),
    "generic_share": (lambda share: 0 <= share <= 1, "a share from 0 to 1"),
}


def key_types(command: str) -> dict[str, str] | None:
    """Return the types of the keys of a command by name, as the sources of the classes that have them write these.

    None if a class is not where the versions that were tried have it; its keys are then known when it is imported.
    """
    types: dict[str, str] = {}
    for package, file, name in _CLASSES[command]:
        specification = importlib.util.find_spec(package)
        folders = (specification and specification.submodule_search_locations) or [""]
        path = Path(folders[0], file)
        classes = ast.parse(path.read_bytes()).body if path.is_file() else []
        found = next((node for node in classes if isinstance(node, ast.ClassDef) and node.name == name), None)
        if found is None:
            return None
        for node in found.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                types |= {node.target.id: ast.unparse(node.annotation)}
    return {name: kind for name, kind in types.items() if not name.startswith("_")}


def as_numbers(words: Mapping[str, Any], types: Mapping[str, str]) -> dict[str, Any]:
    """Return the words of keys that take a number alone as numbers, or refuse one as `argparse` does; others are left out."""
    numbers: dict[str, Any] = {}
    for key, word in words.items():
        names = {*re.findall(r"\w+", types.get(key, ""))} - {"Optional", "None"}
        kind = {"int": int, "float": float}.get("".join(names))
        if kind is not None and isinstance(word, str):
            try:
                numbers[key] = kind(word)
            except ValueError:
                flags = "/".join(dict.fromkeys((f"--{key}", f"--{key.replace('_', '-')}")))
                raise ValueError(f"argument {flags}: invalid {kind.__name__} value: {word!r}.") from None
    return numbers


def check_ranges(values: Mapping[str, Any]) -> None:
    """Refuse numbers out of the range of their key."""
    for key, (is_right, expected) in _RANGES.items():
        value = values.get(key)
        if isinstance(value, int | float) and not is_right(value):
            raise ValueError(f"{key} is {value!r}; expected {expected}.")


def check_early(command: str, keys: Mapping[str, Any]) -> None:
    """Refuse keys of which a mistake can be told without a library: values as YAML has them, None where none is given."""
    check_ranges(keys)
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
    """Refuse a model in a folder whose config has no record of `upscale`; a config that cannot be read is its loader's matter."""
    try:
        config = saved_config(name)
    except ValueError:
        return
    if isinstance(config, dict) and config:
        parts = [config, *(part for part in config.values() if isinstance(part, dict))]
        if not any("upscale" in part for part in parts):
            raise nothing_new(config.get("text_config", config).get("model_type"))


def check_data(key: str, value: Any) -> None:
    if not value:
        raise ValueError(f"config has no {key!r}; set it in the recipe, or by --{key}.")


def sources_of(keys: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return all that a run reads: the name of each key, with its path or id of a model or dataset."""
    sources: list[tuple[str, Any]] = []
    for key in SOURCES:
        value = keys.get(key)
        if isinstance(value, Mapping):
            sources += [(f"{key}.{name}", path) for name, path in value.items()]
        else:
            sources += [(key, path) for path in (value if isinstance(value, list) else [value])]
    return [(key, path) for key, path in sources if isinstance(path, str)]


def check_folder(output: Path, sources: Iterable[tuple[str, str]]) -> None:
    """Refuse an output that cannot be written, holds an input of the run, or lies in one."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"output_dir is {str(output)!r}, a file; expected a folder.")
    ancestor = next(folder for folder in (output.absolute(), *output.absolute().parents) if folder.exists())
    if not ancestor.is_dir() or not os.access(ancestor, os.W_OK):
        raise ValueError(
            f"output_dir is {str(output)!r}, but {str(ancestor)!r} is no folder to write in; choose another."
        )
    for key, source in sources:
        if Path(source).exists():  # a name that is no path is the id of a model or dataset
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
        f"trainable is 'auto', and this {kind} model is a base, not an upscaled model: nothing in it is new. Upscale it first, "
        "set trainable: all to train the base itself, or set adapters, such as adapters: {r: 16}."
    )


def format_of(source: str, columns: list[str]) -> tuple[str, ...]:
    """Return the columns of the format of rows of `midus sft` that have these columns, or refuse rows of none."""
    for expected in FORMATS:
        if set(expected) <= set(columns):
            return expected
    formats = "; ".join(", ".join(expected) for expected in FORMATS)
    raise ValueError(
        f"dataset_name is {source!r}, whose rows have {', '.join(columns) or 'nothing'}; expected the columns of a format "
        f"({formats}). Rename them."
    )

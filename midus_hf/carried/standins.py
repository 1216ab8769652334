"""What stands in a checkpoint's own code for parts of the package that it does without: registries, reading of options, this room.

A definition of this module takes the place of every definition of the package that has its name.
"""

import copy
import dataclasses
import inspect
import os
import shutil
import sys
from pathlib import Path
from typing import Any

ENTRY_MODULE = "modeling_midus"
MEMORY_TYPES: dict[str, Any] = {}
"""The options of each type of memory that this code has."""
MEMORY_MODULES: dict[str, Any] = {}
"""The module of each of these types."""
WRITTEN_FOR: dict[str, dict[str, Any]] = {}
"""The options of each type of memory that this code was written for: it lacks what other values need."""


def register_memory_type(name: str) -> Any:
    """Register the options of a type of memory."""

    def decorate(cls: Any) -> Any:
        cls.type = name
        MEMORY_TYPES[name] = cls
        return cls

    return decorate


def register_memory(name: str) -> Any:
    """Register the module of a type of memory."""

    def decorate(cls: Any) -> Any:
        cls.memory_type = name
        MEMORY_MODULES[name] = cls
        return cls

    return decorate


def module_of(memory_type: str) -> Any:
    """Return the class of a type's module."""
    return MEMORY_MODULES[memory_type]


def option(default: Any, help: str, type: str = "") -> Any:
    """Return a dataclass field with a default and a line that explains it."""
    return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata={"help": help})


def check_entry(values: Any) -> None:
    """Refuse a type of memory, or a site of it, that this code was not written for.

    Raises:
        ValueError: If it is one.
    """
    memory_type = values["type"]
    if memory_type not in WRITTEN_FOR:
        raise _refusal(f"memory type is {memory_type!r}", " or ".join(map(repr, WRITTEN_FOR)))
    sites = WRITTEN_FOR[memory_type]["site"]
    site = values.get("site", MEMORY_TYPES[memory_type].sites[0])
    if site not in sites:
        raise _refusal(f"memory of type {memory_type!r} has site = {site!r}", " or ".join(map(repr, sites)))


def read_options(options_class: Any, values: dict[str, Any], what: str) -> Any:
    """Return the options that a config gives.

    Raises:
        ValueError: If this code was written for others.
    """
    written_for = {key: value for key, value in WRITTEN_FOR[options_class.type].items() if key != "site"}
    for key, value in values.items():
        if written_for.get(key, value) != value:
            raise _refusal(f"{what} has {key} = {value!r}", repr(written_for[key]))
    return options_class(**{**written_for, **values})


def _refusal(what: str, expected: str) -> ValueError:
    return ValueError(
        f"{what}; expected {expected}, for which {ENTRY_MODULE}.py was written. "
        "Load the model with midus-hf installed, and save it again."
    )


def auto_map(name: str) -> dict[str, str]:
    """Return the `auto_map` of a config that belongs to `{name}Config`, `{name}Model` and `{name}ForCausalLM`."""
    return {
        "AutoConfig": f"{ENTRY_MODULE}.{name}Config",
        "AutoModel": f"{ENTRY_MODULE}.{name}Model",
        "AutoModelForCausalLM": f"{ENTRY_MODULE}.{name}ForCausalLM",
    }


def write_code(folder: str | os.PathLike, config: Any) -> list[Path]:
    """Copy this file into the folder of a checkpoint."""
    path = Path(folder, f"{ENTRY_MODULE}.py")
    path.parent.mkdir(parents=True, exist_ok=True)
    source = Path(inspect.getfile(sys.modules[type(config).__module__]))
    if not (path.exists() and path.samefile(source)):
        shutil.copyfile(source, path)
    return [path]

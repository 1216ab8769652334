"""Replacements, by name, in a checkpoint's own code: registries, options, banks, `midus_hf.carried`."""

import contextlib
import copy
import dataclasses
import inspect
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from midus_hf.config.errors import RequestError
from midus_hf.memories.hosting.parts import LayerNames

ENTRY_MODULE = "modeling_midus"
#: The options class of each type of memory in this code.
MEMORY_TYPES: dict[str, Any] = {}


def register_memory(name: str, default_name: str = "") -> Any:
    def decorate(cls: Any) -> Any:
        cls.type, cls.default_name = name, default_name or name
        MEMORY_TYPES[name] = cls
        return cls

    return decorate


def register_layer(options_class: Any) -> Any:
    def decorate(cls: Any) -> Any:
        options_class.layer = cls
        return cls

    return decorate


def layer_class(options: Any, attention: Any = None) -> Any:
    return type(options).layer


def memory_type(name: str) -> Any:
    return MEMORY_TYPES[name]


def option(default: Any, help: str, type: str = "") -> Any:
    return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata={"help": help})


def check_entry(values: Any) -> Any:
    """Return an entry; refuse a memory whose type or site this code does not have."""
    name = values["type"]
    if name not in MEMORY_TYPES:
        raise _written_for(f"memory type is {name!r}", MEMORY_TYPES)
    sites = MEMORY_TYPES[name].sites
    site = values.get("site", sites[0])
    if site not in sites:
        raise _written_for(f"memory of type {name!r} has site = {site!r}", sites)
    return values


def read_options(options_class: Any, values: dict[str, Any], subject: str) -> Any:
    return options_class(**values)


def check_place(options: Any, values: Any, name: Any, sizes: Any) -> None:
    """Take the place of a memory as the package wrote it."""


def check_memories(memories: Any) -> None:
    """Take the memories of a config as the package wrote them."""


def check_layer(memory: Any, sizes: Any, count: int) -> None:
    """Take a layer as one that fits its options."""


def decode_cache(model: Any) -> Any:
    """Return a context in which nothing that memories derive from weights is cached."""
    return contextlib.nullcontext()


def _written_for(subject: str, expected: Any) -> RequestError:
    return RequestError(
        f"{subject}; expected {' or '.join(map(repr, expected))}, for which {ENTRY_MODULE}.py was written. "
        "Load the model with midus-hf installed, and save it again."
    )


def write_code(folder: str | os.PathLike, config: Any) -> list[Path]:
    """Copy the module of the config's class into a checkpoint's folder; return the copy's path."""
    path = Path(folder, f"{ENTRY_MODULE}.py")
    path.parent.mkdir(parents=True, exist_ok=True)
    source = Path(inspect.getfile(sys.modules[type(config).__module__]))
    if not (path.exists() and path.samefile(source)):
        shutil.copyfile(source, path)
    return [path]


def save_bank(bank: Any, folder: Path, *changes: Any) -> None:
    if not (folder.exists() and bank.folder.samefile(folder)):
        shutil.rmtree(folder, ignore_errors=True)  # other checkpoints may link to files there
        shutil.copytree(bank.folder, folder)


class HostLayer(LayerNames):
    """Stands for a layer with attached memories, which this checkpoint does not have."""


class MemoryBlock(LayerNames):
    """Stands for a layer that was inserted for a memory, which this checkpoint does not have."""

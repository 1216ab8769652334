"""Write the code that a checkpoint needs to load where this package is not installed.

Transformers copies remote code only as flat sibling files. The modules of `midus_hf` and `midus_config` import each other by
absolute names in one form, `from midus_hf.a.b import c`; written flat, such a module is called `midus_hf_a_b.py` and the import
reads `from .midus_hf_a_b import c`. One more file, the entry, imports the family and the memory types that the
checkpoint uses.
"""

import importlib
import inspect
import os
import re
from functools import cache
from pathlib import Path

from midus_hf.memory.registry import module_of

ENTRY_MODULE = "modeling_midus"
_PACKAGES = ("midus_hf", "midus_config")
_FLAT_IMPORT = re.compile(r"^from \.(\w+) import", flags=re.MULTILINE)


def auto_map(name: str) -> dict[str, str]:
    """The `auto_map` of a config that belongs to the classes `{name}Config`, `{name}Model` and `{name}ForCausalLM`."""
    return {
        "AutoConfig": f"{ENTRY_MODULE}.{name}Config",
        "AutoModel": f"{ENTRY_MODULE}.{name}Model",
        "AutoModelForCausalLM": f"{ENTRY_MODULE}.{name}ForCausalLM",
    }


def write_code(folder: str | os.PathLike, config) -> list[Path]:
    """Write the entry module and everything that it imports into `folder`.

    Works from the installed package and from code that was itself loaded from a checkpoint.

    Args:
        folder: Created if need be.
        config: A config of a family that hosts memory.

    Returns:
        The paths written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    family = type(config).__module__
    name = type(config).__name__.removesuffix("Config")
    wanted = {family: [f"{name}Config", f"{name}ForCausalLM", f"{name}Model"]}
    for entry in config.memory:
        memory_class = module_of(entry["type"])
        wanted.setdefault(memory_class.__module__, []).append(memory_class.__name__)

    entry_lines = [
        '"""Entry for transformers: the classes that this checkpoint needs. Written when it was saved."""',
        "",
    ]
    entry_lines += [
        f"from .{_flat_name(module)} import {', '.join(dict.fromkeys(names))}"
        for module, names in sorted(wanted.items())
    ]
    sources = {ENTRY_MODULE: "\n".join(entry_lines) + "\n"}
    pending = list(wanted)
    packages = {*_PACKAGES, *(module.partition(".")[0] for module in wanted)}  # a memory may come from another package
    package_import = re.compile(
        rf"^from ((?:{'|'.join(map(re.escape, packages))})(?:\.\w+)*) import", flags=re.MULTILINE
    )
    while pending:
        module = pending.pop()
        flat_name = _flat_name(module)
        if flat_name not in sources:
            source = inspect.getsource(importlib.import_module(module))
            sources[flat_name], imported = _flattened(source, module, package_import)
            pending += imported

    paths = [folder / f"{name}.py" for name in sources]
    for path, source in zip(paths, sources.values(), strict=True):
        path.write_text(source, encoding="utf-8")
    return paths


@cache
def _flattened(source: str, module: str, package_import: re.Pattern[str]) -> tuple[str, list[str]]:
    """The source of a module as it is written flat, and the modules that it imports: a training run saves the same code often."""
    parent = module.rpartition(".")[0]
    if not module.startswith("transformers_modules."):
        source = _FLAT_IMPORT.sub(lambda match: f"from {parent}.{match[1]} import", source)
    imported = [match[1] for match in package_import.finditer(source)]
    imported += [f"{parent}.{match[1]}" for match in _FLAT_IMPORT.finditer(source)]
    return package_import.sub(lambda match: f"from .{_flat_name(match[1])} import", source), imported


def _flat_name(module: str) -> str:
    """What a module is called as a file beside a config: code that was loaded from a checkpoint has such a name already."""
    name = module.rpartition(".")[2]
    if module.startswith("transformers_modules."):
        return name
    flat = module.replace(".", "_")
    return flat if flat.startswith("midus_") else f"midus_of_{flat}"

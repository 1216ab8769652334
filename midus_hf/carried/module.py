"""Write the one module of code that a checkpoint needs to load where this package is not installed.

The module holds what the family and the memories of the checkpoint need, in plain PyTorch. The module is made from the sources of
this package: the definitions that the classes and the needed parts of the checkpoint (`midus_hf.memory.needs`) reach. Each op
is the function in its `reference.py`. Definitions of `standins.py` replace registries, the reading of options and this folder.
"""

import ast
import hashlib
import importlib.util
import os
import pkgutil
import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch

import midus_hf.ops
from midus_hf.carried import standins
from midus_hf.carried.collecting import Program
from midus_hf.carried.sources import Edit, Module, Name, SourceText
from midus_hf.carried.standins import ENTRY_MODULE
from midus_hf.config.memory_entries import Memories
from midus_hf.memory.memory_state import MemoryState
from midus_hf.memory.needs import MIXINS, SERVICES, SITES, needs_of
from midus_hf.memory.registry import build_memory
from midus_hf.version import __version__

_PACKAGES = ("midus_hf",)
# A cache of Transformers calls its methods.
_WHOLE = (Name(MemoryState.__module__, MemoryState.__name__),)
_HEADER = '''"""{family} with memory: the code of one checkpoint, in plain PyTorch.

midus-hf {version} wrote this module from its own sources, for {kinds}. Another checkpoint has
another module of this name. Where the package is imported, its classes are used instead, which compute the same, faster.

SHA-256 of what follows: {digest}
"""

'''


def write_code(folder: str | os.PathLike, config: Any) -> list[Path]:
    """Write the module that a checkpoint needs into a folder.

    Args:
        folder: The folder, which is created if it does not exist.
        config: A config of a family that hosts memory.

    Returns:
        The paths of the files written.
    """
    path = Path(folder, f"{ENTRY_MODULE}.py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(carried_module(config), encoding="utf-8")
    return [path]


def carried_module(config: Any) -> str:
    """Return the source of the module that a checkpoint needs; the same config gives the same source.

    Args:
        config: A config of a family that hosts memory.
    """
    memories: Memories = config.get_text_config().memories()
    with torch.device("meta"):
        modules = [build_memory(entry.options, memories.sizes, 0, len(entry.layers)) for entry in memories.entries]
    hosted = list(zip(memories.entries, modules, strict=True))
    needs = {need for entry, memory in hosted for need in needs_of(entry, memory, memories.sizes)}
    parts: dict[str, type] = {name: part for name, part in {**SERVICES, **SITES}.items() if name in needs}
    kinds = tuple(dict.fromkeys(f"{entry.options.type} memory ({entry.site})" for entry in memories.entries))
    types = dict.fromkeys(type(each) for entry, memory in hosted for each in (entry.options, memory))
    case = (type(config), kinds, *types, *parts)
    if case not in _written:
        named = {entry.rpartition(".")[2] for entry in config.to_dict()["auto_map"].values()}
        classes = [*(getattr(sys.modules[type(config).__module__], name) for name in sorted(named)), *types]
        roots = [Name(each.__module__, each.__name__) for each in (*classes, *parts.values())]
        packages = frozenset((*_PACKAGES, *(root.module.partition(".")[0] for root in roots)))
        left_out = {
            Name(mixin.__module__, mixin.__name__) for mixin, names in MIXINS.items() if needs.isdisjoint(names)
        }
        body = _Layout(Program(roots, packages, left_out, _stand_ins(), frozenset(_PACKAGES), _WHOLE)).text()
        family = type(config).__name__.removesuffix("Config").removeprefix("Midus")
        digest = hashlib.sha256(body.encode()).hexdigest()
        header = _HEADER.format(family=family, version=__version__, kinds=", ".join(kinds), digest=digest)
        _written[case] = header + body
    return _written[case]


# Sources written in this process, since a training run saves the same code often.
_written: dict[tuple[Any, ...], str] = {}


@cache
def _stand_ins() -> dict[str, Name]:
    """Return the definitions that replace, in carried code, every definition of the same name in this package."""
    modules = [*reference_modules(), standins.__name__]
    definitions = {name: Module(name, frozenset(_PACKAGES)).definitions for name in modules}
    return {name: Name(module, name) for module in modules for name in definitions[module] if not name.startswith("_")}


def reference_modules() -> list[str]:
    """Return the names of the `reference` modules of ops, whose functions compute each op of carried code in plain PyTorch."""
    packages = pkgutil.iter_modules(midus_hf.ops.__path__, f"{midus_hf.ops.__name__}.")
    names = (f"{package.name}.reference" for package in packages if package.ispkg)
    return [name for name in names if importlib.util.find_spec(name)]


class _Layout:
    """One source with all definitions of a program, in order, under unique names, with the imports that they need.

    Args:
        program: The definitions to write.
    """

    def __init__(self, program: Program):
        self._program = program
        self._names = _unique_names(program.kept)
        self._imports: dict[str, dict[str, str]] = {}

    def text(self) -> str:
        """Return the whole source of the module."""
        sections = []
        for module in self._order():
            definitions = [self._renamed(module, text) for _, text in self._program.texts(module)]
            if definitions:
                sections.append(f"# {module}\n" + _listed(definitions))
        return f"{self._import_lines()}\n\n" + "\n\n".join(sections)

    def _order(self) -> list[str]:
        """Return the modules, each behind the modules that it depends on."""
        order: list[str] = []
        seen: set[str] = set()

        def visit(module: str) -> None:
            if module not in seen:
                seen.add(module)
                for needed in self._program.module(module).depends:
                    visit(needed)
                order.append(module)

        visit(standins.__name__)
        for name in sorted({name.module for name in self._program.kept}):
            visit(name)
        return order

    def _renamed(self, module: str, source: str) -> str:
        """Return a source with each name replaced by its unique name, and record the imports that the source needs."""
        text, names, local = _analysed(source)
        libraries = self._program.module(module).libraries
        edits = []
        for name, start in names:
            resolved = self._program.resolve(module, name)
            if resolved is not None and resolved in self._names:
                if self._names[resolved] != name:
                    if self._names[resolved] in local:
                        raise ValueError(
                            f"{module} has a variable {self._names[resolved]!r}, and uses a definition that has this name "
                            "in the code of a checkpoint; expected another name for one of them. Rename the variable."
                        )
                    edits.append(Edit(start, start + len(name.encode()), self._names[resolved]))
            elif name in libraries:
                library, called = libraries[name]
                self._imports.setdefault(library, {})[name] = called
            elif name in self._program.module(module).imports:
                raise ValueError(
                    f"{module} reads {name}, which no module of {module.partition('.')[0]} defines as a function, a class or a "
                    "constant, so that the code of a checkpoint cannot have it. Import names from the modules that define them: "
                    "from package.module import name."
                )
        for statement in text.tree.body:
            name = str(getattr(statement, "name", ""))
            own = self._names.get(Name(module, name))
            if own and own != name:
                start = text.bytes.index(name.encode(), text.offset(statement.lineno, statement.col_offset))
                edits.append(Edit(start, start + len(name), own))
        return text.edited(edits)

    def _import_lines(self) -> str:
        lines = []
        for module, names in self._imports.items():
            listed = [name if name == bound else f"{name} as {bound}" for bound, name in sorted(names.items())]
            lines += [f"from {module} import {', '.join(listed)}"] if module else [f"import {name}" for name in listed]
        return "\n".join(sorted(lines))


@cache
def _analysed(source: str) -> tuple[SourceText, list[tuple[str, int]], frozenset[str]]:
    """Return a source with its syntax tree, its names that are not local variables, and the names of its local variables.

    Each name comes with the offset of its first byte.
    """
    text = SourceText(source)
    local = {id(leaf): leaf.id for node in ast.walk(text.tree) for leaf in _local_names(node)}
    names = [
        (node.id, text.span(node)[0])
        for node in ast.walk(text.tree)
        if isinstance(node, ast.Name) and id(node) not in local
    ]
    return text, names, frozenset(local.values())


def _local_names(function: ast.AST) -> list[ast.Name]:
    """Return the names within a function that refer to arguments and local variables, not to definitions of a module."""
    if not isinstance(function, ast.FunctionDef | ast.Lambda):
        return []
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    bound = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    bound |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
    return [node for node in names if node.id in bound]


def _unique_names(kept: Iterable[Name]) -> dict[Name, str]:
    """Return a unique name for each definition, since several modules may define the same name."""
    by_name: dict[str, list[Name]] = {}
    for name in kept:
        by_name.setdefault(name.name, []).append(name)
    unique = {}
    for called, names in by_name.items():
        for number, name in enumerate(sorted(names)):
            leaf = name.module.rpartition(".")[2]
            other = f"{called}_OF_{leaf.upper()}" if called.isupper() else f"{called}_of_{leaf}"
            unique[name] = called if number == 0 else other
    return unique


def _listed(definitions: Iterable[str]) -> str:
    """Return definitions in order, with two empty lines around functions and classes, and none between constants."""
    listed, before_is_constant = "", False
    for definition in definitions:
        text = _GAP.sub("\n\n", definition.strip("\n")) + "\n"
        is_constant = not _COMPOUND.search(text)
        listed += ("" if not listed or (is_constant and before_is_constant) else "\n\n") + text
        before_is_constant = is_constant
    return listed


_COMPOUND = re.compile(r"^(@|def |class )", flags=re.MULTILINE)
# Empty lines within a definition of which something between was removed.
_GAP = re.compile(r"\n{3,}(?= )")

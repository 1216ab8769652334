"""Write the one module of code that a checkpoint needs to load where this package is not installed.

The module holds all definitions that the classes of the family and the memories of the checkpoint reach: whole functions and classes,
in plain PyTorch, as they are written in this package. Each op is the function in its `reference.py`. Definitions of `standins.py`
replace registries, the reading of options and this folder.
"""

import hashlib
import importlib.util
import os
import pkgutil
import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import midus_hf.ops
from midus_hf.carried import absent, standins
from midus_hf.carried.sources import Name, Source, names_read
from midus_hf.carried.standins import ENTRY_MODULE
from midus_hf.config.errors import RequestError
from midus_hf.memories.registry import Memories, layer_class
from midus_hf.version import __version__

_OWN = frozenset({"midus_hf"})
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
    kinds = tuple(dict.fromkeys(f"{entry.options.type} memory ({entry.site})" for entry in memories.entries))
    types = dict.fromkeys(
        each for entry in memories.entries for each in (type(entry.options), layer_class(entry.options))
    )
    case = (type(config), kinds, *types)
    if case not in _written:
        named = {entry.rpartition(".")[2] for entry in config.to_dict()["auto_map"].values()}
        classes = [*(getattr(sys.modules[type(config).__module__], name) for name in sorted(named)), *types]
        roots = [Name(each.__module__, each.__name__) for each in classes]
        packages = _OWN | {root.module.partition(".")[0] for root in roots}
        stand_ins = dict(_stand_ins())
        for name, is_present in (("HostLayer", memories.attached), ("MemoryBlock", memories.inserted)):
            if not is_present:
                stand_ins[name] = Name(absent.__name__, name)
        body = Closure(roots, packages, stand_ins).text()
        family = type(config).__name__.removesuffix("Config").removeprefix("Midus")
        digest = hashlib.sha256(body.encode()).hexdigest()
        header = _HEADER.format(family=family, version=__version__, kinds=", ".join(kinds), digest=digest)
        _written[case] = header + body
    return _written[case]


# Sources written in this process, since a training run saves the same code often.
_written: dict[tuple[Any, ...], str] = {}


@cache
def _stand_ins() -> dict[str, Name]:
    """Return the definitions that replace, definitions of the same name in carried code."""
    modules = [*reference_modules(), standins.__name__]
    definitions = {name: Source(name, _OWN).definitions for name in modules}
    return {name: Name(module, name) for module in modules for name in definitions[module] if not name.startswith("_")}


def reference_modules() -> list[str]:
    """Return the names of the `reference` modules of ops, which carried code computes with."""
    packages = pkgutil.iter_modules(midus_hf.ops.__path__, f"{midus_hf.ops.__name__}.")
    names = (f"{package.name}.reference" for package in packages if package.ispkg)
    return [name for name in names if importlib.util.find_spec(name)]


class Closure:
    """All definitions that some definitions reach, and the top-level calls that use one of them.

    Args:
        roots: The definitions to start from.
        packages: Names of the packages whose sources are copied; all other packages are imported.
        stand_ins: For a name, the definition that replaces every definition of this name in this package.

    Raises:
        RequestError: If a module has statements that cannot be copied, or two definitions have one name.
    """

    def __init__(self, roots: Iterable[Name], packages: Collection[str], stand_ins: Mapping[str, Name]):
        self._packages, self._stand_ins = packages, stand_ins
        self._sources: dict[str, Source] = {}
        self._kept: dict[Name, str] = {}
        pending = list(roots)
        while pending:
            name = pending.pop()
            if name not in self._kept:
                source = self._source(name.module)
                self._kept[name] = source.definition(name.name)
                for text in (self._kept[name], *source.calls_of(name.name)):
                    pending += filter(None, (self._resolved(name.module, each) for each in sorted(names_read(text))))
        defined: dict[str, Name] = {}
        for name in sorted(self._kept):
            self._define(defined, name.name, name)
        # Other names under which definitions are imported, by module.
        self._aliases: dict[str, dict[str, str]] = {}
        for name, text in sorted(self._kept.items()):
            for called in sorted(names_read(text) & self._source(name.module).imports.keys()):
                meant = self._resolved(name.module, called)
                if meant is not None and meant.name != called:
                    self._define(defined, called, meant)
                    self._aliases.setdefault(name.module, {})[called] = meant.name

    @staticmethod
    def _define(defined: dict[str, Name], called: str, name: Name) -> None:
        other = defined.setdefault(called, name)
        if other != name:
            raise RequestError(
                f"{other.module} and {name.module} both define {called}, and the code of a checkpoint needs both; expected one "
                "definition of a name. Rename one of them."
            )

    def text(self) -> str:
        """Return the source of the module: imports, then definitions after those that they import."""
        sections: list[str] = []
        imports: dict[str, set[str]] = {}  # names by the library's module; modules themselves by an empty name
        for module in self._order():
            source = self._source(module)
            names = [name for name in source.definitions if Name(module, name) in self._kept]
            calls = dict.fromkeys(call for name in names for call in source.calls_of(name))
            texts = list(dict.fromkeys([self._kept[Name(module, name)] for name in names] + list(calls)))
            for name in {name for text in texts for name in names_read(text) & source.libraries.keys()}:
                library, called = source.libraries[name]
                imports.setdefault(library, set()).add(called if called == name else f"{called} as {name}")
            texts = [f"{called} = {meant}\n" for called, meant in self._aliases.get(module, {}).items()] + texts
            if texts:
                sections.append(f"# {module}\n{_listed(texts)}")
        lines = [f"import {name}" for name in sorted(imports.pop("", ()))]
        for library, listed in sorted(imports.items()):
            line = f"from {library} import {', '.join(sorted(listed))}"
            if len(line) > 120:
                line = textwrap.fill(
                    f"from {library} import ({', '.join(sorted(listed))})", 120, subsequent_indent="    "
                )
            lines.append(line)
        return "\n".join(lines) + "\n\n\n" + "\n\n".join(sections)

    def _source(self, module: str) -> Source:
        if module not in self._sources:
            self._sources[module] = Source(module, self._packages)
        return self._sources[module]

    def _resolved(self, module: str, name: str) -> Name | None:
        """Return the definition that a name refers to in a module; None for names of libraries."""
        source = self._source(module)
        if name in source.definitions:
            is_own = module.partition(".")[0] in _OWN
            return self._stand_ins[name] if is_own and name in self._stand_ins else Name(module, name)
        if name not in source.imports:
            return None
        origin = source.imports[name]
        resolved = self._resolved(*origin) if origin.name else None
        if resolved is None:
            raise RequestError(
                f"{module} reads {name}, which no module of {module.partition('.')[0]} defines as a function, a class or a "
                "constant, so that the code of a checkpoint cannot have it. Import names from the modules that define them: from "
                "package.module import name."
            )
        return resolved

    def _order(self) -> list[str]:
        """Return the modules, each after the modules that it imports."""
        order: dict[str, None] = {}
        seen: set[str] = set()

        def visit(module: str) -> None:
            if module not in seen:
                seen.add(module)
                for needed in dict.fromkeys(
                    name.module for name in self._source(module).imports.values() if name.name
                ):
                    visit(needed)
                order[module] = None

        visit(standins.__name__)
        for module in sorted({name.module for name in self._kept}):
            visit(module)
        return list(order)


def _listed(texts: Iterable[str]) -> str:
    """Return definitions in order, with empty lines as ruff formats them."""
    listed, before_is_constant = "", False
    for text in texts:
        is_constant = not re.search(r"^(@|def |class )", text, flags=re.MULTILINE)
        listed += ("" if not listed or (is_constant and before_is_constant) else "\n\n") + text
        before_is_constant = is_constant
    return listed

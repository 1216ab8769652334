"""Write the one module of code that a checkpoint needs to load where this package is not installed.

It holds whole functions and classes as this package has them, with `reference_OP` for each op; `standins.py` replaces registries, the
reading of options and this folder.
"""

import ast
import hashlib
import importlib.util
import itertools
import os
import pkgutil
import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import midus_hf.ops
from midus_hf.carried import standins
from midus_hf.carried.standins import ENTRY_MODULE
from midus_hf.config.errors import RequestError
from midus_hf.memories.options import package_only
from midus_hf.memories.registry import Memories, layer_class
from midus_hf.version import __version__

_OWN = frozenset({"midus_hf"})
_HEADER = '''"""{family} with memory: the code of one checkpoint, in plain PyTorch.

midus-hf {version} wrote this module from its own sources, for {kinds}. Another checkpoint has
another module of this name. Where the package is imported, its classes are used instead, which compute the same, faster.

SHA-256 of what follows: {digest}
"""

'''
_REFERENCE = "reference_"  # prefix of the function in plain PyTorch that is the contract of an op
# Decorators that enter a definition in a table that does not travel.
_MARKS = re.compile(r"^@register_(composite_)?family\n", flags=re.MULTILINE)


class Name(NamedTuple):
    """Full name of a definition: a function, a class or a constant at a module's top level."""

    module: str
    name: str


class Source:
    """A module's source by its name; sources of the `packages` are copied, all others are libraries."""

    def __init__(self, name: str, packages: Collection[str]):
        imported: Any = importlib.import_module(name)
        # What each name that is imported from the packages refers to; a module that is imported has an empty name.
        self.imports: dict[str, Name] = {}
        # For each name that is imported from a library, the module, empty for a module itself, and the name there.
        self.libraries: dict[str, tuple[str, str]] = {}
        # The source of each definition, with its decorators and the comments right above it.
        self.definitions: dict[str, str] = {}
        # The calls at the top level that use a definition, such as those that register it.
        self.calls: dict[str, list[str]] = {}
        # Why no definition can be copied: a statement without a name. Else empty.
        self.refusal = ""
        text = imported.__loader__.get_source(imported.__name__) or ""
        self._lines = text.splitlines(keepends=True)
        body: list[ast.stmt] = []
        for statement in ast.parse(text).body:
            is_for_types = isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING"
            body += statement.body if is_for_types else [statement]  # type: ignore[attr-defined]
        for statement, following in itertools.zip_longest(body, body[1:]):
            if isinstance(statement, ast.ImportFrom | ast.Import):
                module = getattr(statement, "module", None)
                if isinstance(statement, ast.ImportFrom) and statement.level:
                    module = importlib.util.resolve_name("." * statement.level + (module or ""), imported.__package__)
                for alias in statement.names:
                    bound = alias.asname or alias.name.partition(".")[0]
                    if (module or alias.name).partition(".")[0] in packages:
                        self.imports[bound] = Name(module, alias.name) if module else Name(alias.name, "")
                    else:
                        self.libraries[bound] = (module or "", alias.name if module or alias.asname else bound)
            elif not isinstance(statement, ast.Expr):
                names = defined(statement)
                if not names or not self.definitions.keys().isdisjoint(names):
                    self.refusal = self.refusal or (
                        f"{imported.__name__} has {ast.unparse(statement).splitlines()[0]!r} in line {statement.lineno}, which is "
                        "neither an import, nor a call, nor the only definition of a name; expected only these at the top level of "
                        "a module that a checkpoint's code is made from. Put it into a function."
                    )
                self.definitions |= dict.fromkeys(names, _MARKS.sub("", self._text(statement, following)))
            elif isinstance(statement.value, ast.Call):
                call = self._text(statement)
                for read in names_read(call):
                    self.calls.setdefault(read, []).append(call)

    def _text(self, statement: Any, following: ast.stmt | None = None) -> str:
        """Return the lines of a statement, with decorators, comments above, and a constant's docstring."""
        first = next(iter(getattr(statement, "decorator_list", ())), statement).lineno
        while first > 1 and self._lines[first - 2].startswith("#"):
            first -= 1
        last = statement.end_lineno
        dropped = _package_only_lines(statement, self._lines)
        if (
            isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and following.lineno == last + 1
        ):
            last = following.end_lineno
        return "".join(self._lines[line - 1] for line in range(first, last + 1) if line not in dropped)


def _package_only_lines(statement: Any, lines: list[str]) -> set[int]:
    """Return the lines of members of a class that checkpoints do not carry, with the empty lines before them."""
    dropped: set[int] = set()
    if not isinstance(statement, ast.ClassDef):
        return dropped
    for member in statement.body:
        decorators: list[ast.expr] = getattr(member, "decorator_list", [])
        if any(isinstance(each, ast.Name) and each.id == package_only.__name__ for each in decorators):
            first = decorators[0].lineno
            while not lines[first - 2].strip():
                first -= 1
            dropped |= {*range(first, (member.end_lineno or first) + 1)}
    return dropped


def defined(statement: ast.stmt) -> list[str]:
    """Return the names that a statement defines, if it is a definition or an assignment."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    if not isinstance(statement, ast.Assign | ast.AnnAssign):
        return []
    elements = [leaf for target in targets for leaf in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [leaf.id for leaf in elements if isinstance(leaf, ast.Name)]


@cache
def names_read(text: str) -> frozenset[str]:
    """Return the names that a source reads, except local variables and quoted annotations."""
    tree = ast.parse(text)
    local: set[int] = set()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.Lambda):
            names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
            bound = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
            bound |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
            local |= {id(node) for node in names if node.id in bound}
    return frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in local)


def write_code(folder: str | os.PathLike, config: Any) -> list[Path]:
    """Write the module that a checkpoint of `config` needs into a folder; return the paths written."""
    path = Path(folder, f"{ENTRY_MODULE}.py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(carried_module(config), encoding="utf-8")
    return [path]


def carried_module(config: Any) -> str:
    """Return the source of the module that a checkpoint needs; the same config gives the same source."""
    memories: Memories = config.get_text_config().memories()
    kinds = tuple(dict.fromkeys(f"{entry.options.type} memory ({entry.site})" for entry in memories.entries))
    types = dict.fromkeys(
        each for entry in memories.entries for each in (type(entry.options), layer_class(entry.options))
    )
    # Base layers host nothing, but hand inputs on to inserted memories.
    hosts_base = bool(memories.attached) or any(_takes_inputs(entry.options) for entry in memories.entries)
    case = (type(config), kinds, hosts_base, *types)
    if case not in _written:
        named = {entry.rpartition(".")[2] for entry in config.to_dict()["auto_map"].values()}
        classes = [*(getattr(sys.modules[type(config).__module__], name) for name in sorted(named)), *types]
        roots = [Name(each.__module__, each.__name__) for each in classes]
        packages = _OWN | {root.module.partition(".")[0] for root in roots}
        replaced = dict(stand_ins())
        for name, is_present in (("HostLayer", hosts_base), ("MemoryBlock", memories.inserted)):
            if is_present:
                del replaced[name]
        body = Closure(roots, packages, replaced).text()
        family = type(config).__name__.removesuffix("Config").removeprefix("Midus")
        digest = hashlib.sha256(body.encode()).hexdigest()
        header = _HEADER.format(family=family, version=__version__, kinds=", ".join(kinds), digest=digest)
        _written[case] = header + body
    return _written[case]


def _takes_inputs(options: Any) -> bool:
    memory_class = layer_class(options)
    return bool(memory_class.forward_arguments or memory_class.needed_services(options))


# Sources written in this process, since a training run saves the same code often.
_written: dict[tuple[Any, ...], str] = {}


@cache
def stand_ins() -> dict[str, Name]:
    """Return what replaces definitions in carried code, by their names."""
    found = pkgutil.iter_modules(midus_hf.ops.__path__, f"{midus_hf.ops.__name__}.")
    modules = [f"{each.name}.op" if each.ispkg else each.name for each in found]
    definitions = {name: Source(name, _OWN).definitions for name in modules if importlib.util.find_spec(name)}
    references = [Name(module, name) for module, names in definitions.items() for name in names]
    return {
        **{name.name.removeprefix(_REFERENCE): name for name in references if name.name.startswith(_REFERENCE)},
        **{
            name: Name(standins.__name__, name)
            for name in Source(standins.__name__, _OWN).definitions
            if name[0] != "_"
        },
    }


class Closure:
    """All definitions that the roots reach, and the top-level calls that use one of them.

    `stand_ins` replaces definitions by name. Modules with statements that cannot be copied, and two definitions of one name, are
    refused.
    """

    def __init__(self, roots: Iterable[Name], packages: Collection[str], stand_ins: Mapping[str, Name]):
        self._stand_ins = stand_ins
        self._source = cache(partial(Source, packages=packages))
        self._kept: dict[Name, str] = {}
        pending = list(roots)
        while pending:
            name = pending.pop()
            if name not in self._kept:
                source = self._source(name.module)
                if source.refusal:
                    raise RequestError(source.refusal)
                self._kept[name] = source.definitions[name.name]
                for text in (self._kept[name], *source.calls.get(name.name, ())):
                    pending += filter(None, (self._resolved(name.module, each) for each in sorted(names_read(text))))
        # Other names under which definitions are imported, by module.
        self._aliases: dict[str, dict[str, str]] = {}
        named = [(name.name, name) for name in sorted(self._kept)]
        for name, text in sorted(self._kept.items()):
            for called in sorted(names_read(text) & self._source(name.module).imports.keys()):
                meant = self._resolved(name.module, called)
                if meant is not None and meant.name != called:
                    named.append((called, meant))
                    self._aliases.setdefault(name.module, {})[called] = meant.name
        defined: dict[str, Name] = {}
        for called, name in named:
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
        order: dict[str, None] = {}  # the modules, each after those that it imports

        def visit(module: str) -> None:
            if module not in seen:
                seen.add(module)
                for needed in dict.fromkeys(
                    name.module for name in self._source(module).imports.values() if name.name
                ):
                    visit(needed)
                order[module] = None

        seen: set[str] = set()
        for module in (standins.__name__, *sorted({name.module for name in self._kept})):
            visit(module)
        for module in order:
            source = self._source(module)
            names = [name for name in source.definitions if Name(module, name) in self._kept]
            calls = dict.fromkeys(call for name in names for call in source.calls.get(name, ()))
            texts = list(dict.fromkeys([self._kept[Name(module, name)] for name in names] + list(calls)))
            for name in {name for text in texts for name in names_read(text) & source.libraries.keys()}:
                library, called = source.libraries[name]
                imports.setdefault(library, set()).add(called if called == name else f"{called} as {name}")
            texts = [f"{called} = {meant}\n" for called, meant in self._aliases.get(module, {}).items()] + texts
            if texts:
                section, before_is_constant = "", False  # empty lines as ruff formats them
                for text in texts:
                    is_constant = not re.search(r"^(@|def |class )", text, flags=re.MULTILINE)
                    section += ("" if not section or (is_constant and before_is_constant) else "\n\n") + text
                    before_is_constant = is_constant
                sections.append(f"# {module}\n{section}")
        lines = [f"import {name}" for name in sorted(imports.pop("", ()))]
        for library, listed in sorted(imports.items()):
            line = f"from {library} import {', '.join(sorted(listed))}"
            if len(line) > 120:
                line = textwrap.fill(
                    f"from {library} import ({', '.join(sorted(listed))})", 120, subsequent_indent="    "
                )
            lines.append(line)
        return "\n".join(lines) + "\n\n\n" + "\n\n".join(sections)

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

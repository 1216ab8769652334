"""Collector of the definitions that a checkpoint's code needs: all that its classes reach, and no others."""

import ast
import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from midus_hf.carried.sources import Definition, Member, Module, Name, read_module, taken_apart
from midus_hf.carried.specialise import (
    READ_BY_LIBRARIES,
    Edit,
    Facts,
    SourceText,
    specialise,
    with_plain_defaults,
    with_short_docstrings,
    without_bare_annotations,
)

_NOT_CARRIED = "not_carried"
_NEEDED_FOR = re.compile(r"needed_for\((.*)\)")
# Modules whose classes lose the members that a checkpoint does not use. Classes of other modules are kept whole.
_PRUNED = ("midus_hf.models.", "midus_hf.banks.", "midus_hf.carried.", "midus_hf.config.")
_MARKS = re.compile(
    r"^ *@(not_carried|needed_for\(.*\)|register_(larger_)?family|register_head)\n",
    flags=re.MULTILINE,
)
_WITH_BASES = re.compile(r"^class \w+\(", flags=re.MULTILINE)
# Functions that take the name of an attribute as an argument.
_BY_NAME = ("getattr", "hasattr", "attrgetter")


class Program:
    """Definitions that some root definitions reach, with the branches resolved that facts decide.

    A class keeps two kinds of members: members whose name is used anywhere in the kept source, and members that override an
    attribute of a library's class, since libraries may call them.

    Args:
        roots: The definitions to start from.
        packages: Names of the packages whose sources are copied; all other packages are imported.
        facts: Function that returns the facts known within a definition.
        needs: Whether the checkpoint's memories have each need, by the name of the need.
        stand_ins: For a name, the definition that replaces every definition of this name in the packages `own`.
        own: Names of the packages whose definitions `stand_ins` replaces.
    """

    def __init__(
        self,
        roots: Iterable[Name],
        packages: frozenset[str],
        facts: Callable[[Name], Facts],
        needs: Mapping[str, bool],
        stand_ins: Mapping[str, Name],
        own: frozenset[str],
    ):
        self._packages, self._facts, self._needs = packages, facts, needs
        self._stand_ins, self._own = stand_ins, own
        self._modules: dict[str, Module] = {}
        self._definitions: dict[Name, Definition] = {}
        # For each kept class and each class that it extends, the attributes of library classes that kept classes extend with it.
        self._hooks: dict[Name, set[str]] = {}
        self._attributes: set[str] = set()
        # Attributes that end with a star, which stand for every name that begins so.
        self._patterns: set[str] = set()
        self._whole: set[Name] = set()
        # Definitions that cannot reach more than they did, since all of their members are kept.
        self._finished: set[Name] = set()
        # For each kept definition, the numbers of the members that are kept.
        self.kept: dict[Name, set[int]] = {}
        self._collect(roots)

    def module(self, name: str) -> Module:
        """Return the module of this name, which is read only once."""
        if name not in self._modules:
            self._modules[name] = read_module(name, self._packages)
        return self._modules[name]

    def resolve(self, module: str, name: str) -> Name | None:
        """Return the definition that a name refers to within a module; None for names of libraries and local names."""
        source_module = self.module(module)
        if name in source_module.definitions:
            is_own = module.partition(".")[0] in self._own
            return self._stand_ins[name] if is_own and name in self._stand_ins else Name(module, name)
        return self.resolve(*source_module.imports[name]) if name in source_module.imports else None

    def definition(self, name: Name) -> Definition:
        """Return a definition with the branches resolved that the facts decide.

        Raises:
            ValueError: If the module of the definition has statements that cannot be copied.
        """
        if name not in self._definitions:
            if self.module(name.module).refusal:
                raise ValueError(self.module(name.module).refusal)
            source = specialise(self.module(name.module).definitions[name.name], self._facts(name))
            source = without_bare_annotations(with_plain_defaults(with_short_docstrings(source)))
            definition = taken_apart(self._without_bases(name, source))
            if not name.module.startswith(_PRUNED):
                self._whole.add(name)
            members = tuple(
                member._replace(source=_MARKS.sub("", member.source))
                for member in definition.members
                if self._is_carried(member.decorators)
            )
            self._definitions[name] = Definition(_MARKS.sub("", definition.head), members)
        return self._definitions[name]

    def texts(self, module: str) -> Iterator[tuple[Name | None, str]]:
        """Yield the text of each kept definition of a module, in order, then each top-level call that uses one of them."""
        names = [name for name in self.module(module).definitions if Name(module, name) in self.kept]
        yielded: set[str] = set()
        for name in names:
            definition, kept = self.definition(Name(module, name)), self.kept[Name(module, name)]
            parts = [member.source for number, member in enumerate(definition.members) if number in kept]
            text = definition.head
            if parts:
                space = "\n" if definition.head.rstrip().endswith(":") else "\n\n"
                text = definition.head.rstrip() + space + "".join(parts).strip("\n") + "\n"
            elif definition.head.rstrip().endswith(":"):
                text += "    pass\n"
            if text not in yielded:  # `a, b = ...` defines two names with one text
                yielded.add(text)
                yield Name(module, name), text
        for call in self.module(module).calls:
            if not names_in(call).isdisjoint(names):
                yield None, call

    def _is_carried(self, decorators: Iterable[str]) -> bool:
        for decorator in decorators:
            needed = _NEEDED_FOR.fullmatch(decorator)
            if decorator == _NOT_CARRIED:
                return False
            if needed and not any(self._needs[need] for need in ast.literal_eval(f"({needed[1]},)")):
                return False
        return True

    def _without_bases(self, name: Name, source: str) -> str:
        """Return the source of a class without the base classes that are not carried."""
        if not _WITH_BASES.search(source):
            return source
        text = _text(source)
        for node in text.tree.body:
            if not isinstance(node, ast.ClassDef) or not node.bases:
                continue
            bases = [base for base in node.bases if self._base_is_carried(name.module, base)]
            if len(bases) < len(node.bases):
                listed = ", ".join(text.of(base) for base in bases)
                first, last = text.start(node.bases[0]), text.end(node.bases[-1])
                if not bases and not node.keywords:
                    first, last = first - 1, last + 1  # remove the brackets too
                return text.edited([Edit(first, last, listed)])
        return source

    def _base_is_carried(self, module: str, base: ast.expr) -> bool:
        resolved = self.resolve(module, base.id) if isinstance(base, ast.Name) else None
        if resolved is None:
            return True
        return self._is_carried(_decorators(self.module(resolved.module).definitions[resolved.name]))

    def _collect(self, roots: Iterable[Name]) -> None:
        pending = list(roots)
        while pending:
            for name in pending:
                if name not in self.kept:
                    self.kept[name] = set()
                    self._add_hooks(name)
            size = self._size()
            open_names = [name for name in self.kept if name not in self._finished]
            reached = dict.fromkeys(name for kept in open_names for name in self._reached_from(kept))
            pending = [name for name in reached if name not in self.kept]
            if not pending and size != self._size():
                pending = list(self.kept)

    def _add_hooks(self, name: Name) -> None:
        """Add the attributes of the library classes that a kept class extends to the hooks of each of our classes among its bases.

        Libraries may use the members that override these attributes. Subclasses that are not kept do not count, since one process
        may have imported them and another not.
        """
        cls: Any = getattr(importlib.import_module(name.module), name.name)
        if not isinstance(cls, type):
            return
        ours = [base for base in cls.__mro__ if base.__module__.partition(".")[0] in self._packages]
        libraries = [base for base in cls.__mro__ if base is not object and base not in ours]
        hooks = {attribute for base in libraries for attribute in vars(base)}
        for base in ours:
            self._hooks.setdefault(Name(base.__module__, base.__name__), set()).update(hooks)

    def _size(self) -> int:
        return len(self._attributes) + sum(map(len, self.kept.values()))

    def _reached_from(self, name: Name) -> Iterator[Name]:
        definition = self.definition(name)
        sources = [definition.head]
        for number, member in enumerate(definition.members):
            if number in self.kept[name] or self._is_wanted(name, member):
                self.kept[name].add(number)
                sources.append(member.source)
        if len(self.kept[name]) == len(definition.members):
            self._finished.add(name)
        sources += [call for call in self.module(name.module).calls if name.name in names_in(call)]
        for source in sources:
            names, attributes = _used(source)
            self._patterns |= {used for used in attributes - self._attributes if used.endswith("*")}
            self._attributes |= attributes
            for used in names:
                resolved = self.resolve(name.module, used)
                if resolved is not None:
                    yield resolved

    def _is_wanted(self, name: Name, member: Member) -> bool:
        if member.name in self._attributes or member.name in self._hooks.get(name, ()) or name in self._whole:
            return True
        is_special = not member.name or (member.name.startswith("__") and member.name.endswith("__"))
        return (
            is_special
            or member.name in READ_BY_LIBRARIES
            or any(fnmatchcase(member.name, pattern) for pattern in self._patterns)
        )


def parsed(source: str) -> ast.Module:
    """Return the syntax tree of the source of a definition, of a member, or of the head of a class."""
    if source.lstrip("\n").startswith("    "):
        return ast.parse(f"class _:\n{source}")
    return ast.parse(f"{source}    pass\n" if source.rstrip().endswith(":") else source)


@cache
def _text(source: str) -> SourceText:
    """Return the text of a definition with its syntax tree, which nothing changes."""
    return SourceText(source)


@cache
def _decorators(source: str) -> tuple[str, ...]:
    """Return the source of each decorator of a definition."""
    (node,) = ast.parse(source).body
    return tuple(ast.unparse(each) for each in getattr(node, "decorator_list", ()))


@cache
def names_in(source: str) -> frozenset[str]:
    """Return all names that a source reads or writes, including names in annotations."""
    return frozenset(node.id for node in ast.walk(parsed(source)) if isinstance(node, ast.Name))


@cache
def _used(source: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names and the attributes that a source uses when it runs, leaving annotations out."""
    tree = parsed(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _BY_NAME:
            attributes |= {str(leaf.value) for leaf in node.args if isinstance(leaf, ast.Constant)}
            attributes |= {_pattern(leaf) for leaf in node.args if isinstance(leaf, ast.JoinedStr)}
    return frozenset(names), frozenset(attributes)


def _pattern(text: ast.JoinedStr) -> str:
    """Return the text of an f-string, with a star in place of each inserted value."""
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in text.values)

"""Collector of the definitions that a checkpoint's code needs: all that its classes reach, and no others."""

import ast
import importlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from midus_hf.carried.sources import (
    Definition,
    Edit,
    Member,
    Module,
    Name,
    SourceText,
    read_module,
    taken_apart,
    with_short_docstrings,
)

# Decorators that enter a definition in a table that does not travel.
_MARKS = re.compile(r"^@(mixin_for\(.*\)|register_(larger_)?family|register_head)\n", flags=re.MULTILINE)
# Attributes that transformers reads, as values or as annotations, without defining them in the classes that ours extend.
_READ_BY_LIBRARIES = ("config", "keys_to_ignore_at_inference", "logit_scale")
# Functions that take the name of an attribute as an argument.
_BY_NAME = ("getattr", "hasattr", "attrgetter")


class Program:
    """Definitions that some root definitions reach.

    A class of the packages `own` keeps two kinds of members: members whose name is used anywhere in the kept source, and members that
    override an attribute of a library's class, since libraries may call them. Classes of other packages are kept whole.

    Args:
        roots: The definitions to start from.
        packages: Names of the packages whose sources are copied; all other packages are imported.
        left_out: Mixins that no class has among its bases.
        stand_ins: For a name, the definition that replaces every definition of this name in the packages `own`.
        own: Names of the packages whose definitions `stand_ins` replaces, and whose classes lose members.
    """

    def __init__(
        self,
        roots: Iterable[Name],
        packages: frozenset[str],
        left_out: Collection[Name],
        stand_ins: Mapping[str, Name],
        own: frozenset[str],
    ):
        self._packages, self._left_out = packages, left_out
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
        """Return a definition, whose classes extend no mixin that is left out.

        Raises:
            ValueError: If the module of the definition has statements that cannot be copied.
        """
        if name not in self._definitions:
            if self.module(name.module).refusal:
                raise ValueError(self.module(name.module).refusal)
            source = _MARKS.sub("", self.module(name.module).definitions[name.name])
            if name.module.partition(".")[0] not in self._own:
                self._whole.add(name)
            self._definitions[name] = taken_apart(self._without_bases(name.module, with_short_docstrings(source)))
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

    def _without_bases(self, module: str, source: str) -> str:
        """Return the source of a class without the base classes that are left out."""
        text = SourceText(source)
        for node in text.tree.body:
            if isinstance(node, ast.ClassDef):
                bases = [text.of(base) for base in node.bases if not self._is_left_out(module, base)]
                if len(bases) < len(node.bases):
                    return text.edited([Edit(text.start(node.bases[0]), text.end(node.bases[-1]), ", ".join(bases))])
        return source

    def _is_left_out(self, module: str, base: ast.expr) -> bool:
        return isinstance(base, ast.Name) and self.resolve(module, base.id) in self._left_out

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
            or member.name in _READ_BY_LIBRARIES
            or any(fnmatchcase(member.name, pattern) for pattern in self._patterns)
        )


def parsed(source: str) -> ast.Module:
    """Return the syntax tree of the source of a definition, of a member, or of the head of a class."""
    if source.lstrip("\n").startswith("    "):
        return ast.parse(f"class _:\n{source}")
    return ast.parse(f"{source}    pass\n" if source.rstrip().endswith(":") else source)


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

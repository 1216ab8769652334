"""Collector of the definitions that a checkpoint's code needs: all that its classes reach, and no others."""

import ast
import importlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from midus_hf.carried.sources import (
    Edit,
    Member,
    Module,
    Name,
    SourceText,
    members_of,
    syntax_tree,
    with_members,
)

# Decorators that enter a definition in a table that does not travel.
_MARKS = re.compile(r"^@(mixin_for\(.*\)|register_(larger_)?family)\n", flags=re.MULTILINE)
# Attributes that transformers reads, as values or as annotations, without defining them in the classes that ours extend.
_READ_BY_LIBRARIES = ("config", "keys_to_ignore_at_inference", "logit_scale")
# Functions that take the name of an attribute as an argument.
_BY_NAME = ("getattr", "hasattr", "attrgetter")


class Program:
    """Definitions that some root definitions reach.

    A class of the packages `own` keeps the members whose name is used anywhere in the kept source, or is that of an attribute of a
    library's class that a kept class extends, since libraries may call these. Classes of other packages are kept whole.

    Args:
        roots: The definitions to start from.
        packages: Names of the packages whose sources are copied; all other packages are imported.
        left_out: Mixins that no class has among its bases.
        stand_ins: For a name, the definition that replaces every definition of this name in the packages `own`.
        own: Names of the packages whose definitions `stand_ins` replaces, and whose classes lose members.
        whole: Classes of ours that keep every member, since a library calls their methods and has no class that they extend.
    """

    def __init__(
        self,
        roots: Iterable[Name],
        packages: frozenset[str],
        left_out: Collection[Name],
        stand_ins: Mapping[str, Name],
        own: frozenset[str],
        whole: Collection[Name] = (),
    ):
        self._packages, self._left_out, self._whole = packages, left_out, whole
        self._stand_ins, self._own = stand_ins, own
        self._modules: dict[str, Module] = {}
        self._sources: dict[Name, str] = {}
        # Names of attributes that the kept source uses, and those of the library classes that kept classes extend.
        self._attributes: set[str] = set(_READ_BY_LIBRARIES)
        # For each kept definition, the numbers of the members that are kept.
        self.kept: dict[Name, set[int]] = {}
        names, size = list(roots), -1
        while size < (size := self._keep(names)):  # a member that is kept may use another attribute
            names = [reached for name in list(self.kept) for reached in self._reached_from(name)]

    def module(self, name: str) -> Module:
        """Return the module of this name, whose source is read once."""
        if name not in self._modules:
            self._modules[name] = Module(name, self._packages)
        return self._modules[name]

    def resolve(self, module: str, name: str) -> Name | None:
        """Return the definition that a name refers to within a module; None for names of libraries and local names."""
        source_module = self.module(module)
        if name in source_module.definitions:
            is_own = module.partition(".")[0] in self._own
            return self._stand_ins[name] if is_own and name in self._stand_ins else Name(module, name)
        return self.resolve(*source_module.imports[name]) if name in source_module.imports else None

    def source(self, name: Name) -> str:
        """Return the whole source of a definition, whose classes extend no mixin that is left out.

        Raises:
            ValueError: If the module of the definition has statements that cannot be copied.
        """
        if name not in self._sources:
            if self.module(name.module).refusal:
                raise ValueError(self.module(name.module).refusal)
            source = _MARKS.sub("", self.module(name.module).definitions[name.name])
            self._sources[name] = self._without_bases(name.module, source)
        return self._sources[name]

    def texts(self, module: str) -> Iterator[tuple[Name | None, str]]:
        """Yield the text of each kept definition of a module, in order, then each top-level call that uses one of them."""
        names = [name for name in self.module(module).definitions if Name(module, name) in self.kept]
        yielded: set[str] = set()
        for name in names:
            text = with_members(self.source(Name(module, name)), self.kept[Name(module, name)])
            if text not in yielded:  # `a, b = ...` defines two names with one text
                yielded.add(text)
                yield Name(module, name), text
        for call in self.module(module).calls:
            if not _used(call)[0].isdisjoint(names):
                yield None, call

    def _without_bases(self, module: str, source: str) -> str:
        """Return the source of a class without the base classes that are left out."""
        text = SourceText(source)
        for node in text.tree.body:
            if isinstance(node, ast.ClassDef):
                bases = [
                    text.of(base)
                    for base in node.bases
                    if self.resolve(module, ast.unparse(base)) not in self._left_out
                ]
                if len(bases) < len(node.bases):
                    return text.edited(
                        [Edit(text.span(node.bases[0])[0], text.span(node.bases[-1])[1], ", ".join(bases))]
                    )
        return source

    def _keep(self, names: Iterable[Name]) -> int:
        """Keep definitions, and return a number that grows with all that is kept."""
        for name in names:
            if name not in self.kept:
                self.kept[name] = set()
                cls: Any = getattr(importlib.import_module(name.module), name.name)
                for base in cls.__mro__[:-1] if isinstance(cls, type) else ():
                    if base.__module__.partition(".")[0] not in self._packages:
                        self._attributes |= vars(base).keys()
        return len(self._attributes) + len(self.kept) + sum(map(len, self.kept.values()))

    def _reached_from(self, name: Name) -> Iterator[Name]:
        source, kept = self.source(name), self.kept[name]
        kept |= {number for number, member in enumerate(members_of(source)) if self._is_wanted(name, member)}
        sources = [with_members(source, kept)]
        sources += [call for call in self.module(name.module).calls if name.name in _used(call)[0]]
        for each in sources:
            names, attributes = _used(each)
            self._attributes |= attributes
            yield from filter(None, (self.resolve(name.module, used) for used in names))

    def _is_wanted(self, name: Name, member: Member) -> bool:
        is_special = not member.name or (member.name.startswith("__") and member.name.endswith("__"))
        is_own = name.module.partition(".")[0] in self._own
        return is_special or not is_own or name in self._whole or member.name in self._attributes


@cache
def _used(source: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names and the attributes that a source uses, quoted annotations aside."""
    tree = syntax_tree(source)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _BY_NAME:
            attributes |= {str(leaf.value) for leaf in node.args if isinstance(leaf, ast.Constant)}
    return frozenset(names), frozenset(attributes)

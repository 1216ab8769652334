"""A module that a checkpoint's code is made from, taken apart into its imports, definitions and calls."""

import ast
import importlib.util
import itertools
import re
from collections.abc import Collection
from functools import cache
from typing import Any, NamedTuple

from midus_hf.config.errors import RequestError

# Decorators that enter a definition in a table that does not travel.
_MARKS = re.compile(r"^@register_(composite_)?family\n", flags=re.MULTILINE)


class Name(NamedTuple):
    """Full name of a definition.

    Args:
        module: The module's name, such as `"midus_hf.memories.midus_hml.layer"`.
        name: Name of a function, a class or a constant at the module's top level.
    """

    module: str
    name: str


class Source:
    """A module by its source as it is now.

    Args:
        name: The module's name, such as `"midus_hf.memories.midus_hml.layer"`.
        packages: Names of the packages whose sources are copied; all other packages are libraries.
    """

    def __init__(self, name: str, packages: Collection[str]):
        imported: Any = importlib.import_module(name)
        self._name, self._package, self._packages = imported.__name__, imported.__package__, packages
        # What each name that is imported from the packages refers to; a module that is imported has an empty name.
        self.imports: dict[str, Name] = {}
        # For each name that is imported from a library, the module, empty for a module itself, and the name there.
        self.libraries: dict[str, tuple[str, str]] = {}
        # The source of each definition, with its decorators and the comments right above it.
        self.definitions: dict[str, str] = {}
        # The source of each call at the top level.
        self._calls: list[str] = []
        # Why no definition can be copied: a statement without a name. Else empty.
        self._refusal = ""
        text = imported.__loader__.get_source(imported.__name__) or ""
        self._lines = text.splitlines(keepends=True)
        body: list[ast.stmt] = []
        for statement in ast.parse(text).body:
            is_for_types = isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING"
            body += statement.body if is_for_types else [statement]  # type: ignore[attr-defined]
        for statement, following in itertools.zip_longest(body, body[1:]):
            self._take(statement, following)

    def definition(self, name: str) -> str:
        """Return the source of a definition.

        Raises:
            RequestError: If the module has statements that cannot be copied.
        """
        if self._refusal:
            raise RequestError(self._refusal)
        return self.definitions[name]

    def calls_of(self, name: str) -> list[str]:
        """Return the calls at the top level that use a definition, such as those that register it."""
        return [call for call in self._calls if name in names_read(call)]

    def _take(self, statement: ast.stmt, following: ast.stmt | None) -> None:
        if isinstance(statement, ast.ImportFrom | ast.Import):
            self._note_import(statement)
        elif isinstance(statement, ast.Expr):
            if isinstance(statement.value, ast.Call):
                self._calls.append(self._text(statement))
        else:
            names = defined(statement)
            if not names or not self.definitions.keys().isdisjoint(names):
                self._refusal = self._refusal or (
                    f"{self._name} has {ast.unparse(statement).splitlines()[0]!r} in line {statement.lineno}, which is neither an "
                    "import, nor a call, nor the only definition of a name; expected only these at the top level of a module that "
                    "a checkpoint's code is made from. Put it into a function."
                )
            self.definitions |= dict.fromkeys(names, _MARKS.sub("", self._text(statement, following)))

    def _text(self, statement: Any, following: ast.stmt | None = None) -> str:
        """Return the lines of a statement, with decorators, comments above, and a constant's docstring."""
        first = next(iter(getattr(statement, "decorator_list", ())), statement).lineno
        while first > 1 and self._lines[first - 2].startswith("#"):
            first -= 1
        last = statement.end_lineno
        if (
            isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and following.lineno == last + 1
        ):
            last = following.end_lineno
        return "".join(self._lines[first - 1 : last])

    def _note_import(self, statement: ast.ImportFrom | ast.Import) -> None:
        module = getattr(statement, "module", None)
        if isinstance(statement, ast.ImportFrom) and statement.level:
            module = importlib.util.resolve_name("." * statement.level + (module or ""), self._package)
        for alias in statement.names:
            bound = alias.asname or alias.name.partition(".")[0]
            if (module or alias.name).partition(".")[0] in self._packages:
                self.imports[bound] = Name(module, alias.name) if module else Name(alias.name, "")
            elif module is None:
                self.libraries[bound] = ("", alias.name if alias.asname else bound)
            else:
                self.libraries[bound] = (module, alias.name)


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

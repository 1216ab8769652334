"""Modules that a checkpoint's code is made from, and their definitions, as source."""

import ast
import importlib.util
from collections.abc import Collection, Iterable
from functools import cache
from typing import Any, NamedTuple


class Edit(NamedTuple):
    """One replacement within a source text.

    Args:
        start: Offset of the first byte that is replaced.
        end: Offset behind the last byte that is replaced.
        text: The text to insert.
    """

    start: int
    end: int
    text: str


@cache
def syntax_tree(source: str) -> ast.Module:
    """Return the syntax tree of a source, which is parsed once and must not be changed."""
    return ast.parse(source)


class SourceText:
    """A source text with its syntax tree, and the text of each node.

    Args:
        source: Source code in Python.
    """

    def __init__(self, source: str):
        self.bytes = source.encode()
        self.tree = syntax_tree(source)
        self._line_starts = [0]
        self._lines = self.bytes.splitlines(keepends=True)
        for line in self._lines:
            self._line_starts.append(self._line_starts[-1] + len(line))

    def offset(self, line: int, column: int) -> int:
        """Return the offset of a position given as in nodes: line from 1, column in bytes."""
        return self._line_starts[line - 1] + column

    def span(self, node: Any) -> tuple[int, int]:
        """Return the offsets of a node's first byte and behind its last; a definition begins with its first decorator."""
        first = next(iter(getattr(node, "decorator_list", ())), node)
        return self.offset(first.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def of(self, node: Any) -> str:
        """Return the source of a node."""
        start, end = self.span(node)
        return self.bytes[start:end].decode()

    def line_span(self, statement: Any) -> tuple[int, int]:
        """Return the numbers of a statement's first and last line, with its decorators and the comments right above it."""
        first: int = next(iter(getattr(statement, "decorator_list", ())), statement).lineno
        while first > 1 and self._lines[first - 2].lstrip().startswith(b"#"):
            first -= 1
        return first, statement.end_lineno

    def lines(self, first: int, last: int) -> str:
        """Return the text of the lines `first` to `last`, counted from 1, inclusive."""
        return self.bytes[self._line_starts[first - 1] : self._line_starts[last]].decode()

    def edited(self, edits: Iterable[Edit]) -> str:
        """Return the text with all edits made, which must not overlap."""
        content = self.bytes
        for edit in sorted(edits, reverse=True):
            content = content[: edit.start] + edit.text.encode() + content[edit.end :]
        return content.decode()


class Name(NamedTuple):
    """Full name of a definition.

    Args:
        module: The module's name, such as `"midus_hf.memory.headwise"`.
        name: Name of a function, a class or a constant at the module's top level.
    """

    module: str
    name: str


class Member(NamedTuple):
    """A method or an attribute of a class.

    Args:
        name: Name of the member; empty for a field of a dataclass or named tuple, and for a statement that defines no name.
        first: Number of the first line behind the member before.
        last: Number of the member's last line.
    """

    name: str
    first: int
    last: int


class Module:
    """A module by its source as it is now, taken apart.

    Args:
        name: The module's name, such as `"midus_hf.memory.headwise"`.
        packages: Names of the packages whose sources are copied; all other packages are libraries.
    """

    def __init__(self, name: str, packages: frozenset[str]):
        # For each name imported from a module of the packages, the definition that the name refers to.
        self.imports: dict[str, Name] = {}
        # For each name imported from a library, the module and the name there; the module is empty if a module is
        # imported.
        self.libraries: dict[str, tuple[str, str]] = {}
        # The source of each definition.
        self.definitions: dict[str, str] = {}
        # The source of each call at the top level.
        self.calls: list[str] = []
        # Why no definition can be copied from the module (it has a statement that may or may not be needed); else
        # empty.
        self.refusal = ""
        # Names of the modules of the packages that this module imports from.
        self.depends: list[str] = []
        imported: Any = importlib.import_module(name)
        self._package: str = imported.__package__
        text = SourceText(imported.__loader__.get_source(imported.__name__) or "")
        body: list[ast.stmt] = []
        for statement in text.tree.body:
            if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
                body += statement.body
            else:
                body.append(statement)
        for index, statement in enumerate(body):
            if isinstance(statement, ast.ImportFrom | ast.Import):
                self._note_import(statement, packages)
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                self.calls.append(text.of(statement) + "\n")
            elif not isinstance(statement, ast.Expr):
                names = defined(statement) if isinstance(statement, _DEFINES) else []
                if not names or not self.definitions.keys().isdisjoint(names):
                    self.refusal = self.refusal or (
                        f"{imported.__name__} has {ast.unparse(statement).splitlines()[0]!r} in line {statement.lineno}, which is "
                        "neither an import, nor a call, nor the only definition of a name; expected these alone at the top level "
                        "of a module that a checkpoint's code is made from. Put it into a function."
                    )
                source = _with_comments(text, statement, body[index + 1 : index + 2])
                self.definitions |= dict.fromkeys(names, source)

    def _note_import(self, statement: ast.ImportFrom | ast.Import, packages: frozenset[str]) -> None:
        module = getattr(statement, "module", None)
        if isinstance(statement, ast.ImportFrom) and statement.level:
            module = importlib.util.resolve_name("." * statement.level + (module or ""), self._package)
        for alias in statement.names:
            bound = alias.asname or alias.name.partition(".")[0]
            if module is None and alias.name.partition(".")[0] in packages:
                self.imports[bound] = Name(alias.name, "")
            elif module is None:
                self.libraries[bound] = ("", alias.name if alias.asname else bound)
            elif module.partition(".")[0] in packages:
                self.imports[bound] = Name(module, alias.name)
                self.depends.append(module)
            else:
                self.libraries[bound] = (module, alias.name)


_DEFINES = (ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)


def defined(statement: ast.stmt) -> list[str]:
    """Return the names that a statement defines."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    elements = [leaf for target in targets for leaf in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [leaf.id for leaf in elements if isinstance(leaf, ast.Name)]


def _with_comments(text: SourceText, statement: ast.stmt, following: list[ast.stmt]) -> str:
    """Return the source of a statement, with the comments right above it and the docstring of a constant right below it."""
    first, last = text.line_span(statement)
    if isinstance(statement, ast.Assign | ast.AnnAssign) and following and _is_docstring(following[0]):
        if following[0].lineno == last + 1:
            _, last = text.line_span(following[0])
    return text.lines(first, last)


@cache
def members_of(source: str) -> tuple[Member, ...]:
    """Return the members of the class in a source; none if the source has no class."""
    text = SourceText(source)
    node = next((statement for statement in text.tree.body if isinstance(statement, ast.ClassDef)), None)
    if node is None:
        return ()
    has_fields = any("dataclass" in ast.unparse(each) for each in node.decorator_list) or any(
        ast.unparse(base) == "NamedTuple" for base in node.bases
    )
    members: list[Member] = []
    first, _ = text.line_span(node.body[0])
    for statement in node.body:
        _, last = text.line_span(statement)
        if _is_docstring(statement):  # of the class, or of the attribute before
            members = [*members[:-1], *(member._replace(last=last) for member in members[-1:])]
        else:
            is_field = has_fields and isinstance(statement, ast.AnnAssign) and "ClassVar" not in text.of(statement)
            members.append(Member("" if is_field else next(iter(defined(statement)), ""), first, last))
        first = last + 1
    return tuple(members)


def with_members(source: str, numbers: Collection[int]) -> str:
    """Return a source with some members of its class alone, by their numbers in `members_of`."""
    members = members_of(source)
    if not members or len(numbers) == len(members):
        return source
    text = SourceText(source)
    head = text.lines(1, members[0].first - 1)
    kept = "".join(text.lines(member.first, member.last) for number, member in enumerate(members) if number in numbers)
    return head + (kept or ("    pass\n" if head.rstrip().endswith(":") else ""))


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)

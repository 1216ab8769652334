"""Partial evaluation of Python source: a branch that facts decide is replaced by the code that would run."""

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

# Known values of expressions, by their source: `{"INSTALLED": False, "self.options.routing": "chunk"}`.
Facts = Mapping[str, Any]

_UNKNOWN = object()
# Attributes that transformers reads, as values or as annotations, without defining them in the classes that ours extend.
READ_BY_LIBRARIES = ("config", "keys_to_ignore_at_inference")
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


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


def specialise(source: str, facts: Facts) -> str:
    """Return the source with every branch resolved that the facts decide.

    `if`, `elif`, conditional expressions and boolean operators are resolved. Statements behind a `return` or `raise` that has become
    unconditional are removed, and so are local variables that nothing reads any more and loops with nothing left in them. Everything
    else, including comments, is left as written.

    Args:
        source: One or more statements at the top level.
        facts: Known values of expressions, by the source of the expression.
    """
    relevant = _relevant(source, facts)
    case = (source, repr(sorted(relevant.items(), key=operator.itemgetter(0))))
    if case not in _specialised:
        while edits := _outermost(_edits(text := SourceText(source), relevant)):
            source = text.edited(edits)
        _specialised[case] = source
    return _specialised[case]


# Results for sources and facts seen in this process: checkpoints with different memories share most of their code.
_specialised: dict[tuple[str, str], str] = {}

_WORD = re.compile(r"\w+")
_PATH = re.compile(r"\w+(\.\w+)+")
_PATHS = re.compile(r"\w+(?:\s*\.\s*\w+)+")


def _relevant(source: str, facts: Facts) -> Facts:
    """Return the facts that may decide something in the source.

    These are the facts whose words all occur in the source or in the value of a fact, which may be written into the source. An
    attribute such as `self.options.routing` must occur as it is, since no value of a fact is one.
    """
    in_source, paths = _words_and_paths(source)
    present = in_source.union(*(_WORD.findall(repr(value)) for value in facts.values()))
    return {
        expression: value
        for expression, value in facts.items()
        if (expression in paths if _PATH.fullmatch(expression) else present.issuperset(_WORD.findall(expression)))
    }


@cache
def _words_and_paths(source: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the words of a source, and its attributes by their path: of `self.options.routing`, also `self.options`."""
    paths = set()
    for path in _PATHS.findall(source):
        parts = [part.strip() for part in path.split(".")]
        paths |= {".".join(parts[:end]) for end in range(2, len(parts) + 1)}
    return frozenset(_WORD.findall(source)), frozenset(paths)


@cache
def with_short_docstrings(source: str) -> str:
    """Return the source with docstrings of one paragraph, behind which only equations and sections that give shapes are kept.

    Args:
        source: One or more statements at the top level.
    """
    text = SourceText(source)
    edits = []
    for node in ast.walk(text.tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node, clean=False):
            docstring = node.body[0]
            first, *others = text.of(docstring).removesuffix('"""').rstrip().split("\n\n")
            kept = [first, *(each for each in others if "`[" in each or _EQUATION.search(each))]
            end = f"\n{' ' * docstring.col_offset}" if "\n" in "\n\n".join(kept) else ""
            edits.append(Edit(text.start(docstring), text.end(docstring), "\n\n".join(kept) + f'{end}"""'))
    return text.edited(edits)


_EQUATION = re.compile(r"`[^`]*[^=`]= [^`]*`")


@cache
def without_bare_annotations(source: str) -> str:
    """Return the source of a class without attributes that are annotated and have no value, unless libraries read the annotation.

    Fields of a dataclass, of a named tuple and of a protocol stay.

    Args:
        source: One or more statements at the top level.
    """
    text = SourceText(source)
    edits = []
    for node in text.tree.body:
        if not isinstance(node, ast.ClassDef) or (node.decorator_list and "dataclass" in text.of(node)):
            continue
        if any(ast.unparse(base) in ("NamedTuple", "Protocol") for base in node.bases):
            continue
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and statement.value is None:
                if ast.unparse(statement.target) not in READ_BY_LIBRARIES:
                    edits.append(_removal(text, statement))
    return specialise(text.edited(edits), {}) if edits else source


@cache
def with_plain_defaults(source: str) -> str:
    """Return the source with `option(default, help)` replaced by the default, if the default is a constant."""
    text = SourceText(source)
    edits = []
    for node in ast.walk(text.tree):
        value = node.value if isinstance(node, ast.AnnAssign) else None
        if (
            isinstance(value, ast.Call)
            and ast.unparse(value.func) == "option"
            and isinstance(value.args[0], ast.Constant)
        ):
            edits.append(Edit(text.start(value), text.end(value), text.of(value.args[0])))
    return text.edited(edits)


class SourceText:
    """A source text with its syntax tree, and the text of each node.

    Args:
        source: Source code in Python.
    """

    def __init__(self, source: str):
        self.bytes = source.encode()
        self.tree = ast.parse(source)
        self._line_starts = [0]
        self._lines = self.bytes.splitlines(keepends=True)
        for line in self._lines:
            self._line_starts.append(self._line_starts[-1] + len(line))

    def offset(self, line: int, column: int) -> int:
        """Return the offset of a position given as in nodes: line from 1, column in bytes."""
        return self._line_starts[line - 1] + column

    def start(self, node: Any) -> int:
        """Return the offset of a node's first byte; for a decorated definition, the offset of its first decorator."""
        decorators = getattr(node, "decorator_list", None)
        if decorators:
            return self.offset(decorators[0].lineno, node.col_offset)
        return self.offset(node.lineno, node.col_offset)

    def end(self, node: Any) -> int:
        """Return the offset behind a node's last byte."""
        return self.offset(node.end_lineno, node.end_col_offset)

    def of(self, node: Any) -> str:
        """Return the source of a node."""
        return self.bytes[self.start(node) : self.end(node)].decode()

    def first_comment(self, line: int, top: int = 1) -> int:
        """Return the number of the first comment line directly above a line, or the line's own number if there is no comment.

        Args:
            line: Number of the line, from 1.
            top: Smallest line number that may be returned. Default: 1.
        """
        while line > top and self._lines[line - 2].lstrip().startswith(b"#"):
            line -= 1
        return line

    def span(self, first: int, last: int) -> tuple[int, int]:
        """Return the start and end offset of the lines `first` to `last`, counted from 1, inclusive."""
        return self._line_starts[first - 1], self._line_starts[last]

    def lines(self, first: int, last: int) -> str:
        """Return the text of the lines `first` to `last`, counted from 1, inclusive."""
        start, end = self.span(first, last)
        return self.bytes[start:end].decode()

    def of_lines_from(self, node: Any, last: int) -> str:
        """Return the source from the first byte of a node to the end of line `last`."""
        return self.bytes[self.start(node) : self.span(last, last)[1]].decode()

    def edited(self, edits: Iterable[Edit]) -> str:
        """Return the text with all edits made, which must not overlap."""
        content = self.bytes
        for edit in sorted(edits, reverse=True):
            content = content[: edit.start] + edit.text.encode() + content[edit.end :]
        return content.decode()


def _outermost(edits: Iterable[Edit]) -> list[Edit]:
    kept: list[Edit] = []
    for edit in sorted(edits, key=lambda edit: (edit.start, -edit.end)):
        if not kept or edit.start >= kept[-1].end:
            kept.append(edit)
    return kept


def _edits(text: SourceText, facts: Facts) -> Iterator[Edit]:
    nodes = list(ast.walk(text.tree))
    tests = _tests(nodes)
    elifs = {id(node.orelse[0]) for node in nodes if isinstance(node, ast.If) and _is_elif(text, node.orelse)}
    for node in nodes:
        if isinstance(node, ast.If):
            yield from _of_if(text, node, facts, id(node) in elifs)
        elif isinstance(node, ast.IfExp):
            value = _truth(node.test, facts)
            if value is not None:
                yield Edit(text.start(node), text.end(node), text.of(node.body if value else node.orelse))
        elif isinstance(node, ast.BoolOp):
            yield from _of_bool(text, node, facts, id(node) in tests)
        elif isinstance(node, ast.FunctionDef):
            yield from _unread_variables(text, node)
            yield from _needless_loops(text, node)
        if not isinstance(node, ast.expr):  # most nodes are, and hold no blocks
            for block in _blocks(node):
                yield from _behind_the_end(text, block)
                yield from _needless(text, block)


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block


def _behind_the_end(text: SourceText, block: list[ast.stmt]) -> Iterator[Edit]:
    for statement in block[:-1]:
        if isinstance(statement, ast.Return | ast.Raise):
            yield Edit(*text.span(_last_line(statement) + 1, _last_line(block[-1])), "")
            return


def _needless(text: SourceText, block: list[ast.stmt]) -> Iterator[Edit]:
    """Remove each `pass` whose block has another statement."""
    passes = [statement for statement in block if isinstance(statement, ast.Pass)]
    for statement in passes[len(passes) == len(block) :]:
        yield Edit(*text.span(statement.lineno, statement.lineno), "")


def _needless_loops(text: SourceText, function: ast.FunctionDef) -> Iterator[Edit]:
    """Remove each loop over a name with nothing left in its body, unless what it assigns is read behind it."""
    nodes = list(ast.walk(function))
    for loop in nodes:
        if not (isinstance(loop, ast.For) and isinstance(loop.iter, ast.Name)):
            continue
        if not all(isinstance(statement, ast.Pass) for statement in (*loop.body, *loop.orelse)):
            continue
        assigned = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
        behind = (node for node in nodes if isinstance(node, ast.Name) and node.lineno > _last_line(loop))
        if not any(node.id in assigned and isinstance(node.ctx, ast.Load) for node in behind):
            yield _removal(text, loop)


def _is_elif(text: SourceText, block: list[ast.stmt]) -> bool:
    return len(block) == 1 and isinstance(block[0], ast.If) and text.of(block[0]).startswith("elif")


def _of_if(text: SourceText, node: ast.If, facts: Facts, is_elif: bool) -> Iterator[Edit]:
    value = _truth(node.test, facts)
    if value is None:
        return
    first, last = text.span(node.lineno, _last_line(node))
    indent, otherwise = " " * node.col_offset, node.orelse
    if value:
        body = _block_lines(text, node, node.body, _last_line(node.test) + 1)
        yield Edit(first, last, f"{indent}else:\n{body}" if is_elif else _dedented(body))
    elif _is_elif(text, otherwise):
        yield Edit(first, text.start(otherwise[0]) + len("elif"), f"{indent}{'elif' if is_elif else 'if'}")
    elif otherwise:
        line = otherwise[0].lineno
        while not text.lines(line, line).strip().startswith("else:"):
            line -= 1
        if is_elif:
            yield Edit(first, text.span(line, line)[0], "")
        else:
            yield Edit(first, last, _dedented(_block_lines(text, node, otherwise, line + 1)))
    elif is_elif:
        yield Edit(first, last, "")
    else:
        yield _removal(text, node)


def _removal(text: SourceText, statement: ast.stmt) -> Edit:
    """Replace a statement and the comments above it by `pass`, since every statement of the block may be removed at once."""
    start, end = text.span(text.first_comment(statement.lineno), _last_line(statement))
    return Edit(start, end, f"{' ' * statement.col_offset}pass\n")


def _last_line(node: Any) -> int:
    return node.end_lineno


def _block_lines(text: SourceText, owner: ast.If, block: list[ast.stmt], top: int) -> str:
    """Return the lines of a block, with the comments above the block's first statement from line `top` on."""
    if block[0].lineno < top:  # on the same line as `if` or `else`
        return f"{' ' * (owner.col_offset + 4)}{text.of_lines_from(block[0], _last_line(block[-1]))}"
    decorators = getattr(block[0], "decorator_list", None)
    first = text.first_comment(decorators[0].lineno if decorators else block[0].lineno, top)
    return text.lines(first, _last_line(block[-1]))


def _dedented(lines: str) -> str:
    return "".join(line.removeprefix("    ") for line in lines.splitlines(keepends=True))


def _of_bool(text: SourceText, node: ast.BoolOp, facts: Facts, is_test: bool) -> Iterator[Edit]:
    """Drop known operands that do not decide the result, and stop at a known operand that does.

    If more than the truth of the result matters, the last operand may be the result: a known last operand is written as its value,
    unless the operand before has the same value whenever the last operand is evaluated.
    """
    ends = isinstance(node.op, ast.Or)
    kept: list[str] = []
    before: ast.expr | None = None
    is_changed = False
    for operand in node.values:
        truth = None if _is_literal(operand) else _truth(operand, facts)
        value = truth if is_test else _value(operand, facts)
        is_needless = is_test or operand is not node.values[-1] or (_is_bool(before) and isinstance(value, bool))
        if truth is not None and truth is not ends and is_needless:
            is_changed = True
        elif truth is None or value is _UNKNOWN:
            kept.append(_in_brackets(text, operand, node.op))
            before = operand
        else:
            kept.append(repr(value))
            is_changed = True
        if truth is ends:
            is_changed = is_changed or operand is not node.values[-1]
            break
    if is_changed:
        word = " or " if ends else " and "
        yield Edit(text.start(node), text.end(node), word.join(kept or [repr(not ends)]))


def _is_bool(expression: ast.expr | None) -> bool:
    """Return whether the value of an expression is a bool, whatever its parts are."""
    if isinstance(expression, ast.Call):
        return ast.unparse(expression.func) in ("bool", "callable", "hasattr", "isinstance", "issubclass")
    if isinstance(expression, ast.Compare):
        return all(isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in expression.ops)
    return isinstance(expression, ast.UnaryOp) and isinstance(expression.op, ast.Not)


def _tests(nodes: Iterable[ast.AST]) -> set[int]:
    """Return the `id` of every expression whose truth alone matters."""
    pending: list[ast.expr] = []
    for node in nodes:
        if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
            pending.append(node.test)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            pending.append(node.operand)
    tests = set()
    while pending:
        expression = pending.pop()
        tests.add(id(expression))
        if isinstance(expression, ast.BoolOp):
            pending += expression.values
    return tests


def _in_brackets(text: SourceText, operand: ast.expr, within: ast.boolop) -> str:
    source = text.of(operand)
    weaker = isinstance(operand, ast.IfExp | ast.Lambda | ast.NamedExpr) or (
        isinstance(operand, ast.BoolOp) and type(operand.op) is not type(within)
    )
    return f"({source})" if weaker else source


def _unread_variables(text: SourceText, function: ast.FunctionDef) -> Iterator[Edit]:
    """Remove assignments to local names that nothing reads, if the assigned expression contains no call."""
    nodes = list(ast.walk(function))
    changed = [node.target for node in nodes if isinstance(node, ast.AugAssign)]
    read = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store)}
    read |= {node.id for node in changed if isinstance(node, ast.Name)}
    declared = {name for node in nodes if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
    for parent in nodes:
        for block in _blocks(parent):
            for statement in block:
                target = _single_target(statement)
                if target is None or target in read or target in declared:
                    continue
                value: Any = getattr(statement, "value", None)
                if value is not None and any(isinstance(node, ast.Call | ast.Await) for node in ast.walk(value)):
                    continue
                yield _removal(text, statement)


def _single_target(statement: ast.stmt) -> str | None:
    if (
        isinstance(statement, ast.Assign)
        and len(statement.targets) == 1
        and isinstance(statement.targets[0], ast.Name)
    ):
        return statement.targets[0].id
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return statement.target.id
    return None


def _is_literal(expression: ast.expr) -> bool:
    """Return whether an operand is a literal, which is kept as written if it is the last operand of a boolean operator."""
    return isinstance(expression, ast.Constant | ast.Tuple | ast.List | ast.Set | ast.Dict)


def _truth(expression: ast.expr, facts: Facts) -> bool | None:
    """Return whether an expression is true; None if the facts do not decide it."""
    value = _value(expression, facts)
    if value is not _UNKNOWN:
        return bool(value)
    if isinstance(expression, ast.BoolOp):
        ends = isinstance(expression.op, ast.Or)
        truths = [_truth(operand, facts) for operand in expression.values]
        if ends in truths:
            return ends
        return None if None in truths else not ends
    return None


def _value_of_bool(expression: ast.BoolOp, facts: Facts) -> Any:
    """Return the value of the first operand that decides, else of the last operand; unknown if an operand before is unknown."""
    value: Any = _UNKNOWN
    for operand in expression.values:
        value = _value(operand, facts)
        if value is _UNKNOWN or bool(value) is isinstance(expression.op, ast.Or):
            break
    return value


def _value(expression: ast.expr, facts: Facts) -> Any:
    if isinstance(expression, ast.Constant):
        return expression.value
    known = facts.get(ast.unparse(expression), _UNKNOWN)
    if known is not _UNKNOWN or isinstance(expression, ast.Name | ast.Attribute):
        return known
    if isinstance(expression, ast.BoolOp):
        return _value_of_bool(expression, facts)
    if isinstance(expression, ast.UnaryOp) and isinstance(expression.op, ast.Not):
        truth = _truth(expression.operand, facts)
        return _UNKNOWN if truth is None else not truth
    if isinstance(expression, ast.Tuple | ast.List | ast.Set):
        values = [_value(element, facts) for element in expression.elts]
        return _UNKNOWN if any(value is _UNKNOWN for value in values) else tuple(values)
    if isinstance(expression, ast.Compare) and len(expression.ops) == 1:
        left, right = _value(expression.left, facts), _value(expression.comparators[0], facts)
        if left is _UNKNOWN or right is _UNKNOWN:
            return _UNKNOWN
        return _COMPARISONS[type(expression.ops[0])](left, right)
    return _UNKNOWN

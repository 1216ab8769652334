"""Tables of text: the separator of a CSV or TSV file, and whether its quotes are valid."""

import csv
import io
import re
from collections.abc import Iterable, Iterator
from typing import Any

from midus_hf.config.errors import RequestError

# Supported separators of fields, with their names in messages.
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs"}
# A field of more lines, each of which would be a row, is treated as rows that a quote swallows.
_MOST_LINES_LIKE_ROWS = 3
_LONGEST_FIELD = 2**31 - 1


def separator_in(text: str, usual: str) -> str:
    """Return the separator of a table: the one that its first line declares, or `usual`, or the one in its first line.

    It is `usual` unless that does not occur in the line of column names and another one does.
    """
    if (declared := declared_separator(text)) is not None:
        return declared
    numbers = {each: len(_fields(text, each, is_literal=each == usual == "\t")) for each in (usual, *SEPARATORS)}
    return usual if numbers[usual] > 1 else max(numbers, key=lambda each: numbers[each])


def declared_separator(text: str) -> str | None:
    """Return the separator that a first line such as `sep=;` declares for spreadsheets; None without such a line."""
    declared = re.match(r'"?sep=([^"\r\n])"?\r?(\n|$)', text, re.IGNORECASE)
    return declared and declared[1]


def name_of(separator: str) -> str:
    """Return the name of a separator in messages."""
    return SEPARATORS.get(separator, repr(separator))


def check_quotes(lines: Iterable[str], first: int = 1, **dialect: Any) -> None:
    """Refuse a table in which a quote takes more than its field, since the rows after it would be lost without an error.

    Args:
        lines: Lines of the file, from that of the columns' names on, with their ends.
        first: Number of the first of them in the file.
        dialect: Arguments of `csv.reader`. With `quoting=csv.QUOTE_NONE` quotes are text, and a field ends with its line.

    Raises:
        RequestError: If a field continues after its closing quote, has none, or contains lines that would be rows.
    """
    longest = csv.field_size_limit(_LONGEST_FIELD)
    try:
        check = _check_literal if dialect.get("quoting") == csv.QUOTE_NONE else _check_quoted
        check(lines, first, dialect)
    finally:
        csv.field_size_limit(longest)


def _check_quoted(lines: Iterable[str], first: int, dialect: dict[str, Any]) -> None:
    taken: list[str] = []  # lines of the row that is read

    def noted() -> Iterator[str]:
        for line in lines:
            taken.append(line)
            yield line

    rows = csv.reader(noted(), strict=True, **dialect)
    begin, columns = first, 0
    problem = ""
    try:
        for row in rows:
            columns = columns or len(row)
            end = begin + len(taken) - 1
            if len(taken) > _MOST_LINES_LIKE_ROWS and columns > 1:
                alone = csv.reader(taken, **{**dialect, "quoting": csv.QUOTE_NONE})
                if all(len(fields) == columns for fields in alone):
                    problem = f"goes on to line {end}, though each of these lines would be a row"
                    break
            begin = end + 1
            taken.clear()
    except csv.Error as error:
        end = begin + len(taken) - 1
        problem = (
            f"is closed in line {end} with text after it" if "expected after" in str(error) else "is never closed"
        )
    if problem:
        raise RequestError(
            f"a field that a quote opens in line {begin} {problem}; expected a field with quotes to stand in quotes and to have each "
            'of them twice, as in "a ""low"" one"'
        )


def _check_literal(lines: Iterable[str], first: int, dialect: dict[str, Any]) -> None:
    columns, opened = 0, None
    for number, row in enumerate(csv.reader(lines, **dialect), first):
        if not row:
            continue
        columns = columns or len(row)
        if opened is not None and len(row) < columns:
            raise RequestError(
                f"a quote opens a field in line {opened}, and line {number} has {len(row)} of {columns} fields; quotes in a TSV file "
                "are text, and a field ends with its line. Save it as CSV or JSON lines"
            )
        opened = number if any(field[:1] == '"' and (field == '"' or field[-1] != '"') for field in row) else None


def _fields(text: str, separator: str, *, is_literal: bool) -> list[str]:
    lines = io.StringIO(text, newline="")
    literal = csv.reader(lines, delimiter=separator, quoting=csv.QUOTE_NONE)
    return next(filter(None, literal if is_literal else csv.reader(lines, delimiter=separator)), [])

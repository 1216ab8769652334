"""Rows of a glossary: names and a text, read as entries."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from midus_hf.config.errors import RequestError
from midus_hf.memories.packs.names import Name, name_of, spelled


class Entry(NamedTuple):
    """An entry of a glossary.

    Args:
        names: The names, as they were given.
        text: What the model should know about them.
        exact: Whether names match only with their case and separators, and without an s. Default: false; short names and those with
            a capital inside keep their case.
    """

    names: tuple[str, ...]
    text: str
    exact: bool = False


class JoinedRows(NamedTuple):
    """Entries of rows.

    Args:
        entries: The entries, by the origin of the first row of each.
        repeated: Number of rows that repeat the names and the text of another one.
    """

    entries: dict[str, Entry]
    repeated: int


def entry_of(row: Mapping[str, Any], where: str) -> Entry:
    """Return the entry of a row.

    Args:
        row: `name`, a name or a list of names, and `text`; perhaps `exact`.
        where: Origin of the row for messages, such as `"row 3 of glossary.jsonl"`.

    Raises:
        RequestError: If a name or the text is invalid, or a name seems to be several.
    """
    given, text, exact = row.get("name"), row.get("text"), row.get("exact")
    names = [given] if isinstance(given, str) else given
    if (
        not isinstance(names, list | tuple)
        or not names
        or not all(isinstance(name, str) and name.strip() for name in names)
    ):
        raise RequestError(
            f"{where} has the name {given!r}; expected a name, or a list of names. Write one, or remove the row."
        )
    if not isinstance(text, str) or not text.strip():
        raise RequestError(
            f"{where} has the text {text!r}; expected what is to be known of {names[0]!r}. Write it, or remove the row."
        )
    if isinstance(exact, str):
        raise RequestError(
            f"{where} has the text {exact!r} under exact; expected true or false, without quotes. Write JSON, since columns of CSV "
            "are text."
        )
    if exact not in (None, True, False):
        raise RequestError(f"{where} has exact = {exact!r}; expected true or false.")
    for name in names:
        if any(sign in name for sign in ";|") or (name.strip().startswith("[") and name.strip().endswith("]")):
            raise RequestError(
                f'{where} has the name {name!r}; did you mean several names? Expected a list, "name": ["first", "second"].'
            )
        if any(ord(sign) < 32 and not sign.isspace() for sign in name) or not spelled(name)[0] or not is_text(name):
            raise RequestError(
                f"{where} has the name {name!r}, which no text can have; expected characters that are seen."
            )
    if not is_text(text):
        raise RequestError(
            f"{where} has the text {text!r:.60}, with half a character; expected whole ones. Write it again as UTF-8."
        )
    return Entry(tuple(dict.fromkeys(name.strip() for name in names)), text, bool(exact))


def joined(rows: Iterable[tuple[str, Entry]]) -> JoinedRows:
    """Return the entries of rows, joining those with the same names, whose texts are joined by a line break.

    Args:
        rows: Origin of each row for messages, and its entry.

    Raises:
        RequestError: If a text could have a name of two entries, as names are compared.
    """
    texts: dict[tuple[frozenset[str], bool], tuple[str, Entry, dict[str, None]]] = {}
    owners: dict[str, list[tuple[Name, tuple[frozenset[str], bool], str]]] = {}
    repeated = 0
    for where, entry in rows:
        key = frozenset(entry.names), entry.exact
        for name, given in names_of(0, entry).items():
            of_folded = owners.setdefault(name.folded, [])
            for other, owner, first in of_folded:
                if owner != key and name.may_be(other):
                    raise RequestError(
                        f"{where} has the name {given!r}, which would also find the entry of {first}; expected names that find one "
                        'entry. Give both rows the same names and the same "exact", which joins them, or, where only case or '
                        'separators differ, "exact": true.'
                    )
            of_folded.append((name, key, where))
        _, _, its_texts = texts.setdefault(key, (where, entry, {}))
        repeated += entry.text in its_texts
        its_texts[entry.text] = None
    return JoinedRows({where: entry._replace(text="\n".join(each)) for where, entry, each in texts.values()}, repeated)


def is_text(text: str) -> bool:
    """Return whether a text can be written in UTF-8: it has no half of a pair of surrogates."""
    return not any("\ud800" <= sign <= "\udfff" for sign in text)


def names_of(number: int, entry: Entry) -> dict[Name, str]:
    """Return the names of an entry as they are compared, and as they were given."""
    return {name_of(number, name, entry.exact): name for name in entry.names}

"""The formats of instruction data: each makes a chat, or a prompt and its completion, of a row."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from midus_hf.documents import DocumentError

_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}
"""What ShareGPT calls the roles of messages."""


@dataclass(frozen=True)
class Chat:
    """Messages with `role` and `content`, in the order in which they were said."""

    messages: list[dict[str, str]]


@dataclass(frozen=True)
class Completion:
    """A text and how it goes on; no template is put around it."""

    prompt: str
    completion: str


Example = Chat | Completion
Reader = Callable[[dict[str, Any], str], Example]


@dataclass(frozen=True)
class Format:
    """One format.

    Args:
        name: As `DataOptions.format` has it.
        columns: What a row of it must have.
        read: Makes an example of a row; the second argument is where the row is, for messages.
    """

    name: str
    columns: tuple[str, ...]
    read: Reader


FORMATS: dict[str, Format] = {}
"""By name, in the order in which columns are compared with them."""


def register_format(name: str, *columns: str) -> Callable[[Reader], Reader]:
    """Register the reader of a format.

    Args:
        name: As `DataOptions.format` has it.
        columns: What a row of it must have.
    """

    def register(read: Reader) -> Reader:
        FORMATS[name] = Format(name, columns, read)
        return read

    return register


def format_named(name: str) -> Format:
    """A format by its name.

    Args:
        name: Of the format.

    Raises:
        ValueError: If there is none of that name.
    """
    if name not in FORMATS:
        raise ValueError(f"data.format is {name!r}; expected one of {', '.join(map(repr, FORMATS))}.")
    return FORMATS[name]


def detect_format(row: Any, place: str) -> Format:
    """The format whose columns a row has.

    Args:
        row: The first of the data.
        place: Where it is, for messages.

    Raises:
        DocumentError: If it has those of none.
    """
    if isinstance(row, dict):
        for known in FORMATS.values():
            if all(column in row for column in known.columns):
                return known
    found = f"the columns {', '.join(map(str, row))}" if isinstance(row, dict) else f"a {type(row).__name__}"
    expected = "; ".join(f"{known.name}: {', '.join(known.columns)}" for known in FORMATS.values())
    raise DocumentError(f"{place} has {found}; expected those of a format ({expected}). Rename them.")


def read_example(known: Format, row: Any, place: str) -> Example:
    """Make an example of a row.

    Args:
        known: The format of the data.
        row: The row.
        place: Where it is, for messages.

    Raises:
        DocumentError: If the row is not of this format.
    """
    if not isinstance(row, dict):
        raise DocumentError(f"{place} is a {type(row).__name__}; expected an object with {', '.join(known.columns)}.")
    absent = [column for column in known.columns if column not in row]
    if absent:
        raise DocumentError(
            f"{place} has no {absent[0]!r}, only {', '.join(map(str, row))}; expected the columns of format {known.name!r}. "
            "Add it, or set data.format."
        )
    return known.read(row, place)


@register_format("messages", "messages")
def _messages(row: dict[str, Any], place: str) -> Chat:
    return Chat(_read_messages(row["messages"], f"{place}, messages"))


@register_format("sharegpt", "conversations")
def _sharegpt(row: dict[str, Any], place: str) -> Chat:
    return Chat(_read_messages(row["conversations"], f"{place}, conversations"))


@register_format("prompt-completion", "prompt", "completion")
def _prompt_completion(row: dict[str, Any], place: str) -> Example:
    if isinstance(row["prompt"], list):
        said = _read_messages(row["prompt"], f"{place}, prompt")
        return Chat(said + _read_messages(row["completion"], f"{place}, completion"))
    return Completion(_text(row, "prompt", place), _text(row, "completion", place))


@register_format("alpaca", "instruction", "output")
def _alpaca(row: dict[str, Any], place: str) -> Chat:
    return _instructed(row, "input", "output", place)


@register_format("dolly", "instruction", "response")
def _dolly(row: dict[str, Any], place: str) -> Chat:
    return _instructed(row, "context", "response", place)


def _instructed(row: dict[str, Any], given: str, answer: str, place: str) -> Chat:
    """An instruction, with what it is about below it if there is anything, and its answer."""
    asked = _text(row, "instruction", place)
    about = _text(row, given, place) if row.get(given) is not None else ""
    question = f"{asked}\n\n{about}" if about.strip() else asked
    return Chat([{"role": "user", "content": question}, {"role": "assistant", "content": _text(row, answer, place)}])


def _read_messages(value: Any, place: str) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise DocumentError(
            f"{place} is {'empty' if value == [] else f'a {type(value).__name__}'}; expected messages."
        )
    messages = []
    for number, message in enumerate(value, start=1):
        keys = ("role", "content") if isinstance(message, dict) and "role" in message else ("from", "value")
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in keys):
            raise DocumentError(
                f"message {number} of {place} is no text with a role; expected role and content, or from and value."
            )
        role, content = (message[key] for key in keys)
        messages.append({"role": _ROLES.get(role, role), "content": content})
    return messages


def _text(row: dict[str, Any], column: str, place: str) -> str:
    if not isinstance(row[column], str):
        raise DocumentError(f"{place} has a {type(row[column]).__name__} under {column!r}; expected text.")
    return row[column]

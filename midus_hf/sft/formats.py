"""The formats of instruction data: each makes a chat, or a prompt and its completion, of a row."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from midus_hf.config.wording import near_matches
from midus_hf.documents import DocumentError

_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Those that chat templates know: `developer` stands for the system, `function` and `ipython` for a tool."""

_SHARE_GPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "observation": "tool",
}
"""What ShareGPT calls the roles of messages."""

_OF_TOOLS = {
    "assistant": ("tool_calls",),
    **dict.fromkeys(("tool", "function", "ipython"), ("tool_call_id", "name")),
}
"""What a message of a role may say of tools, which templates read."""


@dataclass(frozen=True)
class Chat:
    """Messages in the order in which they were said.

    Args:
        messages: Each with `role` and `content`, and perhaps what `_OF_TOOLS` names.
        tools: Schemas of the functions that the assistant may call. Default: none.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None


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
        name: As `SftConfig.dataset_format` has it.
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
        name: As `SftConfig.dataset_format` has it.
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
        raise ValueError(f"dataset_format is {name!r}; expected one of {', '.join(map(repr, FORMATS))}.")
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
            "Add it, or set dataset_format."
        )
    return known.read(row, place)


@register_format("messages", "messages")
def _messages(row: dict[str, Any], place: str) -> Chat:
    return Chat(_read_messages(row["messages"], f"{place}, messages"), _read_tools(row, place))


@register_format("sharegpt", "conversations")
def _sharegpt(row: dict[str, Any], place: str) -> Chat:
    return Chat(_read_messages(row["conversations"], f"{place}, conversations"), _read_tools(row, place))


@register_format("prompt-completion", "prompt", "completion")
def _prompt_completion(row: dict[str, Any], place: str) -> Example:
    if isinstance(row["prompt"], list):
        said = _read_messages(row["prompt"], f"{place}, prompt")
        return Chat(said + _read_messages(row["completion"], f"{place}, completion"), _read_tools(row, place))
    return Completion(_text(row, "prompt", place), _answer(row, "completion", place))


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
    return Chat([{"role": "user", "content": question}, {"role": "assistant", "content": _answer(row, answer, place)}])


def _read_messages(value: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise DocumentError(
            f"{place} is {'empty' if value == [] else f'a {type(value).__name__}'}; expected messages."
        )
    return [_read_message(message, f"message {number} of {place}") for number, message in enumerate(value, start=1)]


def _read_message(message: Any, place: str) -> dict[str, Any]:
    role_key, content_key = (
        ("role", "content") if isinstance(message, dict) and "role" in message else ("from", "value")
    )
    said = message if isinstance(message, dict) else {}
    role, content = said.get(role_key), said.get(content_key)
    calls = said.get("tool_calls") if _SHARE_GPT_ROLES.get(str(role), role) == "assistant" else None
    if content is None and calls:
        content = ""
    if not isinstance(role, str) or not isinstance(content, str):
        raise DocumentError(f"{place} is no text with a role; expected role and content, or from and value.")
    if role not in _ROLES and role not in _SHARE_GPT_ROLES:
        raise DocumentError(
            f"{place} has the role {role!r}, which no template knows. {near_matches(role.lower(), [*_ROLES, *_SHARE_GPT_ROLES])} "
            "Correct it, or take the row out."
        )
    role = _SHARE_GPT_ROLES.get(role, role)
    if role == "assistant" and not calls and not content.strip():
        raise DocumentError(f"{place} is an empty answer; expected text. Fill it in, or take the row out.")
    # Libraries that hold rows as columns give every message every key.
    of_tools = {key: said[key] for key in _OF_TOOLS.get(role, ()) if said.get(key)}
    if calls:
        of_tools["tool_calls"] = _read_calls(calls, place)
    return {"role": role, "content": content, **of_tools}


def _read_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    """Read the tool calls of a message; arguments that are JSON text become the object that templates expect."""
    expected = "expected a list of objects with function: name and arguments"
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise DocumentError(f"{place} has tool_calls that are no calls; {expected}.")
    read = []
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DocumentError(f"{place} calls a tool that has no name; {expected}.")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _of_json(arguments, f"{place} calls {function['name']!r} with arguments")
        called = {**function, "arguments": arguments if arguments is not None else {}}
        read.append({**call, "function": called} if "function" in call else called)
    return read


def _read_tools(row: dict[str, Any], place: str) -> list[Any] | None:
    """Read the column `tools` of a row, a list of schemas or JSON text of one; None where there is none."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        tools = _of_json(tools, f"{place} has tools")
    if tools and not isinstance(tools, list):
        raise DocumentError(f"{place} has a {type(tools).__name__} under 'tools'; expected a list of schemas.")
    return tools or None


def _of_json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DocumentError(f"{what} that are not JSON: {error}. Correct them, or take the row out.") from error


def _text(row: dict[str, Any], column: str, place: str) -> str:
    if not isinstance(row[column], str):
        raise DocumentError(f"{place} has a {type(row[column]).__name__} under {column!r}; expected text.")
    return row[column]


def _answer(row: dict[str, Any], column: str, place: str) -> str:
    answer = _text(row, column, place)
    if not answer.strip():
        raise DocumentError(
            f"{place} has an empty answer under {column!r}; expected text. Fill it in, or take the row out."
        )
    return answer

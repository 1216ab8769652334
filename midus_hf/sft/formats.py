"""Formats of instruction data: each format turns a row into a chat, or into a prompt and its completion."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from midus_hf.config.wording import near_matches
from midus_hf.topics.text_files import DocumentError

# Roles that chat templates know: `developer` stands for the system, `function` and `ipython` for a tool.
_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")

# ShareGPT's names of the roles, and the roles that they stand for.
_SHARE_GPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "observation": "tool",
}

# Keys about tools that templates read, by the role of the message.
_OF_TOOLS = {
    "assistant": ("tool_calls",),
    **dict.fromkeys(("tool", "function", "ipython"), ("tool_call_id", "name")),
}


@dataclass(frozen=True)
class Chat:
    """Messages of a chat, in their order.

    Args:
        messages: Each with `role` and `content`, and perhaps the keys in `_OF_TOOLS`.
        tools: Schemas of the functions that the assistant may call. Default: none.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Completion:
    """A text and its continuation, to which no template is applied."""

    prompt: str
    completion: str


Example = Chat | Completion
Reader = Callable[[dict[str, Any], str], Example]


@dataclass(frozen=True)
class Format:
    """A format of instruction data.

    Args:
        name: Name of the format in `SftConfig.dataset_format`.
        columns: Columns that every row of the format has.
        read: Turns a row into an example; the second argument is the location of the row, for messages.
    """

    name: str
    columns: tuple[str, ...]
    read: Reader


def format_named(name: str) -> Format:
    """Return the format that has a name.

    Raises:
        ValueError: If no format has this name.
    """
    if name not in FORMATS:
        raise ValueError(f"dataset_format is {name!r}; expected one of {', '.join(map(repr, FORMATS))}.")
    return FORMATS[name]


def detect_format(row: Any, location: str) -> Format:
    """Return the first format all of whose columns a row has.

    Raises:
        DocumentError: If the row has the columns of no format.
    """
    if isinstance(row, dict):
        for row_format in FORMATS.values():
            if all(column in row for column in row_format.columns):
                return row_format
    actual = f"the columns {', '.join(map(str, row))}" if isinstance(row, dict) else f"a {type(row).__name__}"
    expected = "; ".join(f"{row_format.name}: {', '.join(row_format.columns)}" for row_format in FORMATS.values())
    raise DocumentError(f"{location} has {actual}; expected those of a format ({expected}). Rename them.")


def read_example(row_format: Format, row: Any, location: str) -> Example:
    """Turn a row into an example.

    Raises:
        DocumentError: If the row does not have this format.
    """
    if not isinstance(row, dict):
        raise DocumentError(
            f"{location} is a {type(row).__name__}; expected an object with {', '.join(row_format.columns)}."
        )
    absent = [column for column in row_format.columns if column not in row]
    if absent:
        raise DocumentError(
            f"{location} has no {absent[0]!r}, only {', '.join(map(str, row))}; expected the columns of format {row_format.name!r}. "
            "Add it, or set dataset_format."
        )
    return row_format.read(row, location)


def _messages(row: dict[str, Any], location: str) -> Chat:
    return Chat(_read_messages(row["messages"], f"{location}, messages"), _read_tools(row, location))


def _sharegpt(row: dict[str, Any], location: str) -> Chat:
    return Chat(_read_messages(row["conversations"], f"{location}, conversations"), _read_tools(row, location))


def _prompt_completion(row: dict[str, Any], location: str) -> Example:
    if isinstance(row["prompt"], list):
        prompt = _read_messages(row["prompt"], f"{location}, prompt")
        return Chat(prompt + _read_messages(row["completion"], f"{location}, completion"), _read_tools(row, location))
    return Completion(_text(row, "prompt", location), _answer(row, "completion", location))


def _alpaca(row: dict[str, Any], location: str) -> Chat:
    return _instructed(row, "input", "output", location)


def _dolly(row: dict[str, Any], location: str) -> Chat:
    return _instructed(row, "context", "response", location)


def _instructed(row: dict[str, Any], context_column: str, answer: str, location: str) -> Chat:
    """Return a chat of an instruction, followed by its context if there is any, and its answer."""
    instruction = _text(row, "instruction", location)
    context = _text(row, context_column, location) if row.get(context_column) is not None else ""
    question = f"{instruction}\n\n{context}" if context.strip() else instruction
    return Chat(
        [{"role": "user", "content": question}, {"role": "assistant", "content": _answer(row, answer, location)}]
    )


def _read_messages(value: Any, location: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise DocumentError(
            f"{location} is {'empty' if value == [] else f'a {type(value).__name__}'}; expected messages."
        )
    return [_read_message(message, f"message {number} of {location}") for number, message in enumerate(value, start=1)]


def _read_message(message: Any, location: str) -> dict[str, Any]:
    role_key, content_key = (
        ("role", "content") if isinstance(message, dict) and "role" in message else ("from", "value")
    )
    fields = message if isinstance(message, dict) else {}
    role, content = fields.get(role_key), fields.get(content_key)
    calls = fields.get("tool_calls") if _SHARE_GPT_ROLES.get(str(role), role) == "assistant" else None
    if content is None and calls:
        content = ""
    if not isinstance(role, str) or not isinstance(content, str):
        raise DocumentError(f"{location} is no text with a role; expected role and content, or from and value.")
    if role not in _ROLES and role not in _SHARE_GPT_ROLES:
        raise DocumentError(
            f"{location} has the role {role!r}, which no template knows. {near_matches(role.lower(), [*_ROLES, *_SHARE_GPT_ROLES])} "
            "Correct it, or take the row out."
        )
    role = _SHARE_GPT_ROLES.get(role, role)
    if role == "assistant" and not calls and not content.strip():
        raise DocumentError(f"{location} is an empty answer; expected text. Fill it in, or take the row out.")
    # Libraries that store rows as columns add every key to every message, so empty values are left out.
    of_tools = {key: fields[key] for key in _OF_TOOLS.get(role, ()) if fields.get(key)}
    if calls:
        of_tools["tool_calls"] = _read_calls(calls, location)
    return {"role": role, "content": content, **of_tools}


def _read_calls(calls: Any, location: str) -> list[dict[str, Any]]:
    """Read the tool calls of a message, with arguments parsed where they are JSON text, as templates expect."""
    expected = "expected a list of objects with function: name and arguments"
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise DocumentError(f"{location} has tool_calls that are no calls; {expected}.")
    read = []
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DocumentError(f"{location} calls a tool that has no name; {expected}.")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _of_json(arguments, f"{location} calls {function['name']!r} with arguments")
        called = {**function, "arguments": arguments if arguments is not None else {}}
        read.append({**call, "function": called} if "function" in call else called)
    return read


def _read_tools(row: dict[str, Any], location: str) -> list[Any] | None:
    """Read the column `tools` of a row, a list of schemas or its JSON text; return None if the column is empty or missing."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        tools = _of_json(tools, f"{location} has tools")
    if tools and not isinstance(tools, list):
        raise DocumentError(f"{location} has a {type(tools).__name__} under 'tools'; expected a list of schemas.")
    return tools or None


def _of_json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DocumentError(f"{what} that are not JSON: {error}. Correct them, or take the row out.") from error


def _text(row: dict[str, Any], column: str, location: str) -> str:
    if not isinstance(row[column], str):
        raise DocumentError(f"{location} has a {type(row[column]).__name__} under {column!r}; expected text.")
    return row[column]


def _answer(row: dict[str, Any], column: str, location: str) -> str:
    answer = _text(row, column, location)
    if not answer.strip():
        raise DocumentError(
            f"{location} has an empty answer under {column!r}; expected text. Fill it in, or take the row out."
        )
    return answer


# Formats by name, in the order in which `detect_format` tries them.
FORMATS = {
    row_format.name: row_format
    for row_format in (
        Format("messages", ("messages",), _messages),
        Format("sharegpt", ("conversations",), _sharegpt),
        Format("prompt-completion", ("prompt", "completion"), _prompt_completion),
        Format("alpaca", ("instruction", "output"), _alpaca),
        Format("dolly", ("instruction", "response"), _dolly),
    )
}

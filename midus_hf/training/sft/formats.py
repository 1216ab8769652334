"""Rows of instruction data as chats, or as a prompt and its completion; what would be dropped is refused by row and key."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

# Columns of the formats, in the order in which they are tried.
FORMATS = (
    ("messages",),
    ("conversations",),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("instruction", "response"),
)
# Columns that chats may have beside those of their format.
_BESIDE = ("system", "tools", "chat_template_kwargs")
_BESIDE_INSTRUCTION = ("input", "context", "history")

# Roles that chat templates know (`developer` stands for the system, `function` and `ipython` for a tool), and ShareGPT's names.
_ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool", "function", "ipython")},
    **{"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant", "function_call": "assistant"},
    **{"observation": "tool", "function_response": "tool"},
}
# Keys of messages by which other trainers leave a message out of the loss; TRL's trainer cannot.
_EXCLUSIONS = ("weight", "train", "loss", "loss_mask")
# Keys of messages that hold reasoning; a template reads one of them.
REASONING = ("reasoning_content", "thinking", "reasoning")
_MESSAGE_KEYS = ("role", "content", "from", "value", "tool_calls", "tool_call_id", "name", *REASONING, *_EXCLUSIONS)

Row = Mapping[str, Any]


def refuse(location: str, key: str, problem: str) -> NoReturn:
    """Raise the `ValueError` about a key of a row or a message.

    Args:
        location: Location of the row or the message, such as `"row 3 of 'chats.jsonl'"`.
        problem: What is wrong with the key, what was expected, and the remedy.
    """
    raise ValueError(f"{location} has {key!r}, {problem}")


def read_row(row: Row, location: str) -> dict[str, Any]:
    """Return a row as the arguments of a chat template, or as the texts `prompt` and `completion`.

    Args:
        row: A row with the columns of one of `FORMATS`. Empty values count as absent, since tables store them for every row.
        location: Location of the row, for messages.

    Returns:
        `{"messages", "tools", "chat_template_kwargs"}`, the last two only where the row has them, or
        `{"prompt", "completion"}`.

    Raises:
        ValueError: If the row has no format, or a value that no chat template would get.
    """
    row = {key: value for key, value in row.items() if value not in (None, "", [], {})}
    columns: tuple[str, ...] | None = next((columns for columns in FORMATS if set(columns) <= set(row)), None)
    if columns is None:
        formats = "; ".join(", ".join(columns) for columns in FORMATS)
        raise ValueError(
            f"{location} has {', '.join(row) or 'nothing'} with a value; expected the columns of a format ({formats}). Rename "
            "them, or fill them in."
        )
    if "history" in row and "instruction" not in columns:
        refuse(location, "history", "which only instructions have. Put its turns into the messages.")
    if columns == ("prompt", "completion") and isinstance(row["prompt"], str):
        for column in _BESIDE:
            if column in row:
                refuse(location, column, "which only chats have, beside a prompt. Make it a chat, or leave it out.")
        return {column: _text(row, column, location) for column in columns}
    if "instruction" in columns:
        messages = _instructed(row, columns[1], location)
    else:
        messages = [message for column in columns for message in _messages(row[column], f"{location}, {column}")]
    if "system" in row:
        if messages[0]["role"] in ("system", "developer"):
            refuse(location, "system", "and a system message. Leave one of them out.")
        messages.insert(0, {"role": "system", "content": _text(row, "system", location)})
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError(
            f"{location} has no answer; expected a message of the assistant. Add it, or take the row out."
        )
    kinds = {"tools": list, "chat_template_kwargs": dict}
    options = {key: _parsed(row[key], kind, location, key) for key, kind in kinds.items() if key in row}
    return {"messages": messages, **options}


def unread_keys(columns: Sequence[str], features: Mapping[str, Any]) -> list[str]:
    """Return the columns of a dataset, and the keys of its messages, that `read_row` does not read."""
    read = next((each for each in FORMATS if set(each) <= set(columns)), ())
    beside = (*_BESIDE, *(_BESIDE_INSTRUCTION if "instruction" in read else ("history",)))
    unread = [column for column in columns if column not in (*read, *beside)]
    for column in read:
        message = getattr(features[column], "feature", None)
        unread += [
            f"{column}.{key}" for key in message or () if isinstance(message, dict) and key not in _MESSAGE_KEYS
        ]
    return unread


def _instructed(row: Row, answer: str, location: str) -> list[dict[str, Any]]:
    """Return an instruction, followed by its context if there is any, and its answer, behind the turns of `history`."""
    pairs = row.get("history", [])
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in pairs
    ):
        refuse(location, "history", "which is no list of pairs of question and answer. Correct it, or take it out.")
    parts = [_text(row, name, location) for name in ("instruction", "input", "context") if name in row]
    turns = [*pairs, ("\n\n".join(part for part in parts if part.strip()), _text(row, answer, location))]
    return [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]


def _text(row: Row, column: str, location: str) -> str:
    if not isinstance(row[column], str):
        refuse(location, column, f"a {type(row[column]).__name__}; expected text.")
    if not row[column].strip() and column in ("output", "response", "completion"):
        refuse(location, column, "an empty answer; expected text. Fill it in, or take the row out.")
    return row[column]


def _messages(value: Any, location: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise ValueError(f"{location} is a {type(value).__name__}; expected messages.")
    return [_message(message, f"message {number} of {location}") for number, message in enumerate(value, start=1)]


def _message(message: Any, location: str) -> dict[str, Any]:
    fields = {key: value for key, value in message.items() if value is not None} if isinstance(message, dict) else {}
    name, content = fields.get("role", fields.get("from")), fields.get("content", fields.get("value"))
    for key in _EXCLUSIONS:
        if key in fields and not fields[key]:
            refuse(
                location,
                key,
                f"{json.dumps(fields[key])}, which would leave its text out of the loss; TRL computes the loss of every answer. End "
                "the chat before the message, or take the key out.",
            )
    calls = fields.get("tool_calls")
    if name == "function_call":
        parsed = _parsed(content, (dict, list), location, "function_call")
        calls, content = parsed if isinstance(parsed, list) else [parsed], ""
    content = "" if content is None and calls else content
    if not isinstance(name, str) or not isinstance(content, str):
        raise ValueError(f"{location} is no text with a role; expected role and content, or from and value.")
    role = _ROLES.get(name)
    if role is None:
        refuse(
            location,
            "role",
            f"{name!r}, which no template knows; expected one of {', '.join(_ROLES)}. Correct it, or take the row out.",
        )
    if calls and role != "assistant":
        refuse(location, "tool_calls", f"and the role {role!r}; expected the assistant to call tools.")
    if role == "assistant" and not calls and not content.strip():
        raise ValueError(f"{location} is an empty answer; expected text. Fill it in, or take the row out.")
    reasoning = [key for key in REASONING if fields.get(key)]
    for key in reasoning[1:]:
        if fields[key] != fields[reasoning[0]]:
            refuse(
                location, key, f"and {reasoning[0]!r} with another text; a template reads one of them. Leave one out."
            )
    others = {key: fields[key] for key in ("tool_call_id", "name", *reasoning[:1]) if fields.get(key)}
    return {"role": role, "content": content, **others, **({"tool_calls": _calls(calls, location)} if calls else {})}


def _calls(calls: Any, location: str) -> list[dict[str, Any]]:
    """Return the calls of a message, with arguments parsed where they are JSON text, as templates expect."""
    read = []
    for call in calls if isinstance(calls, list) else [None]:
        function = (call.get("function") or call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            refuse(
                location,
                "tool_calls",
                "not all with a name; expected a list of objects with function: name and arguments.",
            )
        arguments = _parsed(function.get("arguments") or {}, dict, location, f"arguments of {function['name']}")
        read.append({"type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return read


def _parsed(value: Any, kind: type | tuple[type, ...], location: str, key: str) -> Any:
    """Return a value, parsed where it is JSON text, without the keys that Parquet adds from other rows, whose values are null."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (json.JSONDecodeError, RecursionError) as error:
            refuse(location, key, f"which is not JSON: {error}. Correct it, or take the row out.")
    if not isinstance(value, kind):
        refuse(location, key, f"a {type(value).__name__}; expected another kind. Correct it, or take the row out.")
    return _without_nulls(value)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value

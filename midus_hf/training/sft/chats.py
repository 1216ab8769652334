"""One row of instruction data as a chat, or as a prompt and its completion; what would be lost is refused."""

import json
from collections.abc import Mapping
from typing import Any

# Columns that chats may have beside those of their format, and instructions.
OF_CHATS, OF_INSTRUCTIONS = ("system", "tools", "chat_template_kwargs"), ("system", "history", "input", "context")

# Keys of messages that hold reasoning; a template reads one of them.
REASONING = ("reasoning_content", "thinking", "reasoning")

# Roles that chat templates know; ShareGPT has other names for two of them.
_ROLES = ("system", "developer", "user", "assistant", "tool")
_ROLE_OF_NAME = {**{role: role for role in _ROLES}, "human": "user", "gpt": "assistant"}

# Keys of messages by which other trainers leave an answer out of the loss or weigh it, which TRL's trainer cannot.
EXCLUSIONS = ("weight", "train", "loss", "loss_mask")
_NO_ANSWER = "an empty answer; expected text. Fill it in"

Row = Mapping[str, Any]


def as_texts(row: Row) -> dict[str, str]:
    """Return a prompt and its completion, to which no template is applied."""
    for column in OF_CHATS:
        if row.get(column):
            raise ValueError(
                f"{column!r}, which only chats have, beside a prompt. Make it a chat, leave the column out"
            )
    texts = {column: _text(row, column) for column in ("prompt", "completion")}
    if not texts["completion"].strip():
        raise ValueError(_NO_ANSWER)
    return texts


def as_chat(row: Row, columns: tuple[str, ...]) -> dict[str, Any]:
    """Return lists of messages, with `tools` and `chat_template_kwargs` where the row has them, or refuse what would be lost."""
    if columns[0] == "instruction":
        chat: dict[str, Any] = {"messages": _instructed(row, columns[1])}
    else:
        chat = {}
        for column in columns:
            given = row[column]
            if not given or not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
                raise ValueError(f"{column!r}: {given!r:.60}; expected a list of messages. Correct it")
            chat["messages" if len(columns) == 1 else column] = [_message(each) for each in given]
    roles = {message["role"] for each in chat.values() for message in each}
    if "assistant" not in roles:
        raise ValueError("no answer; expected a message of the assistant. Add it")
    if row.get("system"):
        if roles & {"system", "developer"}:
            raise ValueError("'system' and a system message. Leave one of them out")
        next(iter(chat.values())).insert(0, {"role": "system", "content": _text(row, "system")})
    for column, kind, none in (("tools", list, None), ("chat_template_kwargs", dict, {})):
        if column in row:
            chat[column] = _parsed(row[column], kind, column) if row[column] else none
    return chat


def _instructed(row: Row, answer: str) -> list[dict[str, Any]]:
    """Return an instruction, followed by its context if there is any, and its answer, behind the turns of `history`."""
    turns = row.get("history") or []
    if not isinstance(turns, list) or not all(
        isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn) for turn in turns
    ):
        raise ValueError(f"'history': {turns!r:.60}; expected a list of pairs of question and answer. Correct it")
    context = [column for column in ("input", "context") if row.get(column) is not None]
    question = "\n\n".join(part for column in ("instruction", *context) if (part := _text(row, column)).strip())
    if not question:
        raise ValueError("an empty instruction; expected text. Fill it in")
    return [
        _message({"role": role, "content": text})
        for turn in (*turns, (question, _text(row, answer)))
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the names of TRL, parsed calls and no keys that are null, as if it had none."""
    message = {key: value for key, value in message.items() if value is not None}
    for name, key in (("from", "role"), ("value", "content")):
        if name in message and key not in message:
            message[key] = message.pop(name)
    role, content, calls = (message.get(key) for key in ("role", "content", "tool_calls"))
    if role not in list(_ROLE_OF_NAME):
        expected = ", ".join(_ROLES)
        raise ValueError(f"the role {role!r}, which no template knows; expected one of {expected}. Correct it")
    role = message["role"] = _ROLE_OF_NAME[role]
    for key in EXCLUSIONS:
        if message.get(key, 1) != 1:
            raise ValueError(
                f"a message with {key}: {message[key]}, which the loss would not follow; TRL learns every answer alike. End the chat "
                "before the message"
            )
    if calls:
        if role != "assistant":
            raise ValueError(
                f"'tool_calls' in a message of the {role}; expected the assistant to call tools. Correct it"
            )
        message["tool_calls"] = [_call(call) for call in _parsed(calls, list, "tool_calls")]
    elif role == "assistant" and not str(content or "").strip():
        raise ValueError(_NO_ANSWER)
    message["content"] = "" if content is None and calls else content
    if not isinstance(message["content"], str):
        raise ValueError(f"a message of the {role} with the content {content!r:.60}; expected text. Correct it")
    return message


def _call(call: Any) -> dict[str, Any]:
    """Return a call of a tool, with arguments parsed where they are JSON text, which some templates would encode again."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(
            f"the call {call!r:.60} in 'tool_calls'; expected a function with name and arguments. Correct it"
        )
    arguments = _parsed(function.get("arguments") or {}, dict, f"arguments of {function['name']}")
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def _text(row: Row, column: str) -> str:
    if not isinstance(row[column], str):
        raise ValueError(f"{column!r}: {row[column]!r:.60}; expected text. Correct it")
    return row[column]


def _parsed(value: Any, kind: type, name: str) -> Any:
    """Return a list or an object, parsed where it is JSON text."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{name!r}, which is not JSON: {error}. Correct it") from error
    if not isinstance(parsed, kind):
        expected = "a list" if kind is list else "an object"
        raise ValueError(f"{name!r}: {parsed!r:.60}; expected {expected}. Correct it")
    return parsed


def without_nulls(value: Any) -> Any:
    """Return a value without the keys, at any depth, that are null."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value

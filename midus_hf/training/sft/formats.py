"""Formats of instruction data: each turns a row into a chat, or into a prompt and its completion, and drops nothing silently."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Roles that chat templates know: `developer` stands for the system, `function` and `ipython` for a tool.
_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")

# ShareGPT's names of the roles, and the roles that they stand for.
_SHARE_GPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}

# Columns that a row of any format may have beside those of its format.
_COMMON = ("system", "history", "tools", "chat_template_kwargs")

# Keys of messages by which other trainers leave a message out of the loss; TRL's trainer cannot.
_EXCLUSIONS = ("weight", "train", "loss", "loss_mask")

# Keys of messages that hold reasoning; templates read one of them.
REASONING = ("reasoning_content", "thinking", "reasoning")
_MESSAGE_KEYS = ("role", "content", "from", "value", "tool_calls", "tool_call_id", "name", *REASONING, *_EXCLUSIONS)

Row = Mapping[str, Any]


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
    for columns, read in FORMATS.items():
        if set(columns) <= set(row):
            example = read(row, location)
            break
    else:
        formats = "; ".join(", ".join(columns) for columns in FORMATS)
        raise ValueError(
            f"{location} has {', '.join(row) or 'nothing'} with a value; expected the columns of a format ({formats}). Rename "
            "them, or fill them in."
        )
    if "prompt" in example:
        _refuse(row, _COMMON, f"{location}, a prompt and its completion,")
        return example
    messages = [*_history(row, location), *example["messages"]]
    if "system" in row:
        if messages[0]["role"] in ("system", "developer"):
            raise ValueError(f"{location} has a column 'system' and a system message; leave one out.")
        messages = [{"role": "system", "content": _text(row, "system", location)}, *messages]
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError(
            f"{location} has no answer; expected a message of the assistant. Add it, or take the row out."
        )
    example = {"messages": messages}
    if "tools" in row:
        example["tools"] = _parsed(row["tools"], list, f"{location} has 'tools'")
    if "chat_template_kwargs" in row:
        example["chat_template_kwargs"] = _parsed(
            row["chat_template_kwargs"], dict, f"{location} has 'chat_template_kwargs'"
        )
    return example


def unread_keys(columns: Sequence[str], features: Mapping[str, Any]) -> list[str]:
    """Return the columns of a dataset, and the keys of its messages, that `read_row` does not read."""
    format_columns = next((each for each in FORMATS if set(each) <= set(columns)), ())
    if "instruction" in format_columns:
        format_columns = (*format_columns, "input", "context")
    unread = [column for column in columns if column not in (*format_columns, *_COMMON)]
    for column in set(format_columns) & {"messages", "conversations"}:
        message = getattr(features[column], "feature", None)
        if isinstance(message, dict):
            unread += [f"{column}.{key}" for key in message if key not in _MESSAGE_KEYS]
    return unread


def _messages_of(column: str) -> Callable[[Row, str], dict[str, Any]]:
    return lambda row, location: {"messages": _read_messages(row[column], f"{location}, {column}")}


def _prompt_completion(row: Row, location: str) -> dict[str, Any]:
    if isinstance(row["prompt"], list):
        prompt = _read_messages(row["prompt"], f"{location}, prompt")
        completion = row["completion"]
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        return {"messages": prompt + _read_messages(completion, f"{location}, completion")}
    return {name: _text(row, name, location) for name in ("prompt", "completion")}


def _instructed(answer: str) -> Callable[[Row, str], dict[str, Any]]:
    def read(row: Row, location: str) -> dict[str, Any]:
        """Return a chat of an instruction, followed by its context if there is any, and its answer."""
        parts = [_text(row, name, location) for name in ("instruction", "input", "context") if name in row]
        question = "\n\n".join(part for part in parts if part.strip())
        return {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": _text(row, answer, location)},
            ]
        }

    return read


# Readers of the formats by the columns that a row of the format has, in the order in which they are tried.
FORMATS: dict[tuple[str, ...], Callable[[Row, str], dict[str, Any]]] = {
    ("messages",): _messages_of("messages"),
    ("conversations",): _messages_of("conversations"),
    ("prompt", "completion"): _prompt_completion,
    ("instruction", "output"): _instructed("output"),
    ("instruction", "response"): _instructed("response"),
}


def _history(row: Row, location: str) -> list[dict[str, str]]:
    """Return the earlier turns of an instruction, which Alpaca's descendants keep as pairs of question and answer."""
    if "history" not in row:
        return []
    pairs = row["history"]
    if "instruction" not in row:
        raise ValueError(f"{location} has a column 'history' beside messages; put its turns into the messages.")
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in pairs
    ):
        raise ValueError(f"{location} has 'history'; expected a list of pairs of question and answer.")
    turns = [(("user", question), ("assistant", answer)) for question, answer in pairs]
    return [{"role": role, "content": content} for turn in turns for role, content in turn]


def _read_messages(value: Any, location: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise ValueError(f"{location} is a {type(value).__name__}; expected messages.")
    return [_read_message(message, f"message {number} of {location}") for number, message in enumerate(value, start=1)]


def _read_message(message: Any, location: str) -> dict[str, Any]:
    fields = {key: value for key, value in message.items() if value is not None} if isinstance(message, dict) else {}
    role, content = fields.get("role", fields.get("from")), fields.get("content", fields.get("value"))
    for key in _EXCLUSIONS:
        if key in fields and not fields[key]:
            raise ValueError(
                f"{location} has {key}: {json.dumps(fields[key])}, which would leave its text out of the loss; TRL computes the loss "
                "of every answer. End the chat before the message, or take the key out."
            )
    calls = fields.get("tool_calls")
    if role == "function_call":
        calls, content = _parsed(content, (dict, list), f"{location} has the role 'function_call'"), ""
        calls = calls if isinstance(calls, list) else [calls]
    content = "" if content is None and calls else content
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError(f"{location} is no text with a role; expected role and content, or from and value.")
    if role not in _ROLES and role not in _SHARE_GPT_ROLES:
        raise ValueError(
            f"{location} has the role {role!r}, which no template knows; expected one of "
            f"{', '.join([*_ROLES, *_SHARE_GPT_ROLES])}. Correct it, or take the row out."
        )
    role = _SHARE_GPT_ROLES.get(role, role)
    if calls and role != "assistant":
        raise ValueError(f"{location} has 'tool_calls' and the role {role!r}; expected the assistant to call tools.")
    if role == "assistant" and not calls and not content.strip():
        raise ValueError(f"{location} is an empty answer; expected text. Fill it in, or take the row out.")
    read = {"role": role, "content": content}
    read |= {key: fields[key] for key in ("tool_call_id", "name", *REASONING) if fields.get(key)}
    return {**read, "tool_calls": _read_calls(calls, location)} if calls else read


def _read_calls(calls: Any, location: str) -> list[dict[str, Any]]:
    """Return the calls of a message, with arguments parsed where they are JSON text, as templates expect."""
    expected = "expected a list of objects with function: name and arguments"
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"{location} has 'tool_calls' that are no calls; {expected}.")
    read = []
    for call in calls:
        function = call.get("function") or call
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{location} calls a tool that has no name; {expected}.")
        named = f"{location} calls {function['name']!r} with arguments"
        arguments = function.get("arguments")
        arguments = {} if arguments in (None, "") else _parsed(arguments, dict, named)
        # Parquet gives a call the arguments of all other rows too, without a value.
        read.append(
            {"type": "function", "function": {"name": function["name"], "arguments": _without_nulls(arguments)}}
        )
    return read


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _parsed(value: Any, kind: type | tuple[type, ...], what: str) -> Any:
    """Return a value, parsed where it is JSON text, without the keys that a table added."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{what} that is not JSON: {error}. Correct it, or take the row out.") from error
    if not isinstance(value, kind):
        raise ValueError(
            f"{what} that is a {type(value).__name__}; expected another kind. Correct it, or take the row out."
        )
    return _without_nulls(value)


def _text(row: Row, column: str, location: str) -> str:
    if not isinstance(row[column], str):
        raise ValueError(f"{location} has a {type(row[column]).__name__} under {column!r}; expected text.")
    if not row[column].strip() and column in ("output", "response", "completion"):
        raise ValueError(
            f"{location} has an empty answer under {column!r}; expected text. Fill it in, or take the row out."
        )
    return row[column]


def _refuse(row: Row, columns: Sequence[str], what: str) -> None:
    for column in columns:
        if column in row:
            raise ValueError(
                f"{what} has a column {column!r}, which only chats have; make it a chat, or leave it out."
            )

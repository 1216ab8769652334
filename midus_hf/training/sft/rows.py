"""Rows of instruction data in TRL's formats; messages name refused rows and ignored columns."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midus_hf.config.errors import RequestError, print_note
from midus_hf.data.corpus import TEXT_KINDS, read_rows
from midus_hf.sources.tokenizers import prefix_ids

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

_FORMATS = tuple(
    tuple(columns.split())
    for columns in ("messages", "conversations", "prompt completion", "instruction output", "instruction response")
)
# Columns that chats may have in addition to those of their format, and those of instructions.
_OF_CHATS = ("system", "tools", "chat_template_kwargs")
_OF_INSTRUCTIONS = ("system", "history", "input", "context")

# Keys of messages that hold reasoning; a template reads one of them.
_REASONING = ("reasoning_content", "thinking", "reasoning")

# Roles that chat templates know; ShareGPT has other names for two of them.
_ROLES = ("system", "developer", "user", "assistant", "tool")
_ROLE_OF_NAME = {**{role: role for role in _ROLES}, "human": "user", "gpt": "assistant"}

# Keys of messages with which other trainers leave an answer out of the loss or weight it, which TRL's trainer cannot do.
_EXCLUSIONS = ("weight", "train", "loss", "loss_mask")
_NO_ANSWER = "an empty answer; expected text. Fill it in"

Row = Mapping[str, Any]
# Keys of messages that every template may read.
_READ = ("role", "content", "name", "tool_call_id")
# Keys of messages that are refused where the template does not write them.
_WRITTEN = ("tool_calls", *_REASONING)

_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
# ChatML, with the markers around answers from which TRL finds their tokens.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def read_chats(arguments: Any, tokenizer: "PreTrainedTokenizerBase") -> "Dataset":
    """Return a run's rows as TRL reads them: `messages`, or `prompt` and `completion`, and any `tools`.

    Unread columns and keys of messages are listed on standard error. For chats, the tokenizer gets the template of the arguments.
    """
    source = arguments.dataset_name
    rows = read_rows("dataset_name", source, split=arguments.dataset_train_split, name=arguments.dataset_config)
    columns = _format_of(source, rows.column_names)
    if not len(rows):
        raise RequestError(f"dataset_name is {source!r}, which has no rows. Add data.")
    others = _OF_INSTRUCTIONS if columns[0] == "instruction" else _OF_CHATS
    kept = [column for column in rows.column_names if column in (*columns, *others)]
    unread = [column for column in rows.column_names if column not in kept]
    template = None
    kind = getattr(rows.features[columns[0]], "dtype", None)
    if columns[0] != "prompt" or kind not in TEXT_KINDS:
        set_template(tokenizer, arguments.chat_template_path)
        if arguments.assistant_only_loss:
            _check_marks_answers(tokenizer)
        template = re.sub(r"\{#.*?#\}", "", tokenizer.get_chat_template(), flags=re.DOTALL)
    rows, keys = _converted(rows.select_columns(kept), columns, template, source)
    if unread + keys:
        print_note(f"dataset_name {source!r}: not read: {', '.join(unread + keys)}")
    return rows


def _format_of(source: str, columns: list[str]) -> tuple[str, ...]:
    for expected in _FORMATS:
        if set(expected) <= set(columns):
            return expected
    formats = "; ".join(", ".join(expected) for expected in _FORMATS)
    raise RequestError(
        f"dataset_name is {source!r}, whose rows have {', '.join(columns) or 'nothing'}; expected the columns of a format "
        f"({formats}). Rename them."
    )


def _converted(
    rows: "Dataset", columns: tuple[str, ...], template: str | None, source: str
) -> tuple["Dataset", list[str]]:
    """Return rows as chats, or as texts without a template, and names of keys that nothing reads."""
    from datasets import Features, Value

    from midus_hf.data.readers import JsonText

    unread: set[str] = set()
    # A table has each key in every row, null where the row has none, so chats are stored as JSON.
    filled = {column.name for column in rows.data.schema if "struct<" in str(column.type)}

    def convert(row: Mapping[str, Any], index: int) -> dict[str, Any]:
        row = {column: without_nulls(value) if column in filled else value for column, value in row.items()}
        try:
            if template is None:
                return as_texts(row)
            chat = as_chat(row, columns)
            check_written(chat, template)
        except RequestError as problem:
            raise RequestError(f"row {index + 1} of {source!r} has {problem}, or remove the row.") from problem
        for message in [message for name in messages for message in chat[name]]:
            held = [key for key, value in message.items() if value not in ("", [])]
            known = (*_READ, *_WRITTEN, *_EXCLUSIONS)
            unread.update(f"messages.{key}" for key in held if key not in known and not reads_key(template, key))
        return {column: JsonText().encode_example(value) for column, value in chat.items()}

    messages = columns if columns[0] == "prompt" else ("messages",)
    kept = [column for column in ("tools", "chat_template_kwargs") if column in rows.column_names and template]
    features = {name: JsonText() if template else Value("string") for name in messages}
    features |= {column: JsonText() for column in kept}
    options = {"with_indices": True, "remove_columns": rows.column_names, "load_from_cache_file": False}
    converted = rows.map(convert, features=Features(features), desc="reading rows", **options)
    return converted, sorted(unread)


def set_template(tokenizer: "PreTrainedTokenizerBase", named: str | None) -> None:
    """Set a tokenizer's template: "chatml", or a file with a Jinja template; None keeps its own."""
    if named == "chatml":
        if not all(token in tokenizer.get_vocab() for token in _CHATML_TOKENS):
            raise RequestError(
                f"chat_template_path is 'chatml', whose tokens {' and '.join(_CHATML_TOKENS)} this tokenizer lacks; give a file with "
                "a template of tokens that it has."
            )
        begins = prefix_ids(tokenizer)[:1] == [tokenizer.bos_token_id]
        tokenizer.chat_template = "{{ bos_token }}" + CHATML if begins else CHATML
    elif named is not None:
        try:
            tokenizer.chat_template = Path(named).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(
                f"chat_template_path is {named!r}; expected chatml, or a file with a Jinja template."
            ) from error
    if not tokenizer.chat_template:
        raise RequestError(
            "the model's tokenizer has no chat template; set chat_template_path to chatml, or to a file with a template that has "
            "{% generation %} around answers."
        )


def _check_marks_answers(tokenizer: "PreTrainedTokenizerBase") -> None:
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    template: Any = tokenizer.chat_template
    if has_generation_markers(template):
        return
    try:
        get_training_chat_template(tokenizer)
    except ValueError:
        has_chatml = all(token in tokenizer.get_vocab() for token in _CHATML_TOKENS)
        way = "chatml" if has_chatml else "a file with a template that has {% generation %} around answers"
        raise RequestError(
            "the model's chat template does not mark answers, on which the loss is computed, and TRL has no version of it that "
            f"does; expected a template with {{% generation %}}. Pass --chat_template_path {way}, or --assistant_only_loss false."
        ) from None


def check_written(chat: Mapping[str, Any], template: str) -> None:
    """Refuse a chat with variables or message keys, other than text, that a template does not use."""
    variables = [*(["tools"] if chat.get("tools") else []), *(chat.get("chat_template_kwargs") or {})]
    messages = [message for column in ("messages", "prompt", "completion") for message in chat.get(column, ())]
    keys = [key for key in _WRITTEN if any(message.get(key) for message in messages)]
    unwritten = [key for key in variables if not re.search(rf"\b{re.escape(key)}\b", template)]
    unwritten += [key for key in keys if not reads_key(template, key)]
    if unwritten:
        problem = f"{unwritten[0]!r}, which the chat template does not write"
        raise RequestError(f"{problem}. Set chat_template_path to one that does")


def reads_key(template: str, key: str) -> bool:
    """Return whether a template reads a message key, not just text such as `<thinking>` or a variable."""
    return re.search(rf"[.'\"]{re.escape(key)}\b", template) is not None


def as_texts(row: Row) -> dict[str, str]:
    """Return a prompt and its completion, which get no template."""
    for column in _OF_CHATS:
        if row.get(column):
            raise RequestError(f"{column!r}, which only chats have. Make it a chat, leave the column out")
    texts = {column: _text(row, column) for column in ("prompt", "completion")}
    if not texts["completion"].strip():
        raise RequestError(_NO_ANSWER)
    return texts


def as_chat(row: Row, columns: tuple[str, ...]) -> dict[str, Any]:
    """Return lists of messages, with any `tools` and `chat_template_kwargs`; refuse what would be lost."""
    if columns[0] == "instruction":
        chat: dict[str, Any] = {"messages": _instructed(row, columns[1])}
    else:
        chat = {}
        for column in columns:
            given = row[column]
            if not given or not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
                raise RequestError(f"{column!r}: {given!r:.60}; expected a list of messages. Correct it")
            chat["messages" if len(columns) == 1 else column] = [_message(each) for each in given]
    roles = {message["role"] for each in chat.values() for message in each}
    if "assistant" not in roles:
        raise RequestError("no answer; expected a message of the assistant. Add it")
    if row.get("system"):
        if roles & {"system", "developer"}:
            raise RequestError("'system' and a system message. Leave one of them out")
        next(iter(chat.values())).insert(0, {"role": "system", "content": _text(row, "system")})
    for column, kind, none in (("tools", list, None), ("chat_template_kwargs", dict, {})):
        if column in row:
            chat[column] = _parsed(row[column], kind, column) if row[column] else none
    return chat


def _instructed(row: Row, answer: str) -> list[dict[str, Any]]:
    turns = row.get("history") or []
    are_pairs = (isinstance(turn, list) and [*map(type, turn)] == [str, str] for turn in turns)
    if not isinstance(turns, list) or not all(are_pairs):
        raise RequestError(f"'history': {turns!r:.60}; expected a list of pairs of question and answer. Correct it")
    context = [column for column in ("input", "context") if row.get(column) is not None]
    parts = [_text(row, column) for column in ("instruction", *context)]
    question = "\n\n".join(part for part in parts if part.strip())
    if not question:
        raise RequestError("an empty instruction; expected text. Fill it in")
    return [
        _message({"role": role, "content": text})
        for turn in (*turns, (question, _text(row, answer)))
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a chat's message with the names that templates read; refuse one that cannot train."""
    message = {key: value for key, value in message.items() if value is not None}
    for name, key in (("from", "role"), ("value", "content")):
        if name in message and key not in message:
            message[key] = message.pop(name)
    role, content, calls = (message.get(key) for key in ("role", "content", "tool_calls"))
    if role not in list(_ROLE_OF_NAME):
        expected = ", ".join(_ROLES)
        raise RequestError(f"the role {role!r}, which no template knows; expected one of {expected}. Correct it")
    role = message["role"] = _ROLE_OF_NAME[role]
    for key in _EXCLUSIONS:
        if message.get(key, 1) != 1:
            problem = f"a message with {key}: {message[key]}, which the loss would ignore"
            raise RequestError(f"{problem}; TRL weights all answers equally. End the chat before the message")
    if calls:
        if role != "assistant":
            raise RequestError(f"'tool_calls' in a message of the {role}; expected one of the assistant. Correct it")
        message["tool_calls"] = [_call(call) for call in _parsed(calls, list, "tool_calls")]
    elif role == "assistant" and not str(content or "").strip():
        raise RequestError(_NO_ANSWER)
    message["content"] = "" if content is None and calls else content
    if not isinstance(message["content"], str):
        raise RequestError(f"a message of the {role} with the content {content!r:.60}; expected text. Correct it")
    return message


def _call(call: Any) -> dict[str, Any]:
    """Return a tool call with parsed arguments: some templates would encode JSON text again."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"the call {call!r:.60} in 'tool_calls'; expected a name and arguments. Correct it")
    arguments = _parsed(function.get("arguments") or {}, dict, f"arguments of {function['name']}")
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def _text(row: Row, column: str) -> str:
    if not isinstance(row[column], str):
        raise RequestError(f"{column!r}: {row[column]!r:.60}; expected text. Correct it")
    return row[column]


def _parsed(value: Any, kind: type, name: str) -> Any:
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except (json.JSONDecodeError, RecursionError) as error:
        raise RequestError(f"{name!r}, which is not JSON: {error}. Correct it") from error
    if not isinstance(parsed, kind):
        expected = "a list" if kind is list else "an object"
        raise RequestError(f"{name!r}: {parsed!r:.60}; expected {expected}. Correct it")
    return parsed


def without_nulls(value: Any) -> Any:
    """Return a value without the keys, at any depth, that are null."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value

"""Rows of instruction data in the formats that TRL reads, and the template that makes texts of chats."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midus_hf.training.data.corpus import read_rows, say

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

# Columns of the formats, in the order in which they are tried.
_FORMATS = (
    ("messages",),
    ("conversations",),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("instruction", "response"),
)
# Columns that rows may have beside those of their format.
_OF_CHATS, _OF_INSTRUCTIONS = ("system", "tools", "chat_template_kwargs"), ("system", "history", "input", "context")

# Roles that chat templates know; ShareGPT has other names for two of them.
_ROLES = ("system", "developer", "user", "assistant", "tool")
_ROLE_OF_NAME = {**{role: role for role in _ROLES}, "human": "user", "gpt": "assistant"}

# Keys of messages: those that every template may read, those that are refused where the template does not write them, and those by
# which other trainers leave an answer out of the loss, which TRL's trainer cannot.
_READ, _WRITTEN, _EXCLUSIONS = (
    ("role", "content", "name", "tool_call_id"),
    ("tool_calls", "reasoning_content", "thinking"),
    ("weight", "train"),
)

_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
# ChatML, with the marks around answers by which TRL finds their tokens.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def set_template(tokenizer: "PreTrainedTokenizerBase", named: str | None) -> None:
    """Give a tokenizer the template that a person names.

    Args:
        named: `"chatml"`, or the path of a file with a Jinja template. None: the tokenizer keeps its own.

    Raises:
        ValueError: If the template cannot be read, the tokenizer lacks its tokens, or has no template at all.
    """
    if named == "chatml":
        if not all(token in tokenizer.get_vocab() for token in _CHATML_TOKENS):
            raise ValueError(
                f"chat_template_path is 'chatml', whose tokens {' and '.join(_CHATML_TOKENS)} this tokenizer lacks; give a file with "
                "a template of tokens that it has."
            )
        begins = tokenizer.bos_token_id is not None and tokenizer("").input_ids[:1] == [tokenizer.bos_token_id]
        tokenizer.chat_template = "{{ bos_token }}" * begins + CHATML
    elif named is not None:
        try:
            tokenizer.chat_template = Path(named).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"chat_template_path is {named!r}; expected chatml, or a file with a Jinja template."
            ) from error
    if not tokenizer.chat_template:
        raise ValueError(
            "the model's tokenizer has no chat template; set chat_template_path to chatml, or to a file with a template that has "
            "{% generation %} around answers."
        )


def read_chats(arguments: Any, tokenizer: "PreTrainedTokenizerBase") -> "Dataset":
    """Return the rows of a run as TRL reads them: `messages`, or `prompt` and `completion`, with `tools` where there are any.

    Columns and keys of messages that are not read are named on standard error.

    Args:
        arguments: The keys of `SftArguments` that begin with `dataset_` are read, and `chat_template_path`.
        tokenizer: Tokenizer of the model, which gets the template that the arguments name, if the rows are chats.

    Raises:
        ValueError: If the data cannot be read or has no rows; if a row is of no format, has no answer, or has what the template
            would not write; or as `set_template`.
    """
    source = arguments.dataset_name
    rows = read_rows("dataset_name", source, split=arguments.dataset_train_split, name=arguments.dataset_config)
    columns = next((columns for columns in _FORMATS if set(columns) <= set(rows.column_names)), None)
    if columns is None:
        formats = "; ".join(", ".join(columns) for columns in _FORMATS)
        raise ValueError(
            f"dataset_name is {source!r}, whose rows have {', '.join(rows.column_names) or 'nothing'}; expected the columns of a "
            f"format ({formats}). Rename them."
        )
    if not len(rows):
        raise ValueError(f"dataset_name is {source!r}, which has no rows. Add data.")
    beside = _OF_INSTRUCTIONS if columns[0] == "instruction" else _OF_CHATS
    kept = [column for column in rows.column_names if column in (*columns, *beside)]
    unread = [column for column in rows.column_names if column not in kept]
    rows = rows.select_columns(kept)
    is_chat = columns[0] != "prompt" or isinstance(rows[0]["prompt"], list)
    if is_chat:
        set_template(tokenizer, arguments.chat_template_path)
        rows = _as_chats(rows, columns)
        template: Any = tokenizer.get_chat_template()
        unread += _check_chats(rows, template, source)
    if unread:
        say(f"dataset_name {source!r}: not read: {', '.join(unread)}")
    return rows


def _as_chats(rows: "Dataset", columns: tuple[str, ...]) -> "Dataset":
    """Return rows as chats that TRL reads, as objects, to which a table adds no keys of other rows."""
    from datasets import Features, Json, List
    from trl.trainer.utils import remove_none_values

    def as_chat(row: Mapping[str, Any]) -> dict[str, Any]:
        if columns[0] == "instruction":
            parts = [row[name] for name in ("instruction", "input", "context") if row.get(name)]
            turns = [*(row.get("history") or []), ("\n\n".join(parts), row[columns[1]])]
            pairs = [pair for turn in turns for pair in zip(("user", "assistant"), turn, strict=True)]
            chat = {"messages": [{"role": role, "content": text} for role, text in pairs]}
        elif columns[0] == "conversations":
            pairs = [(m.get("from") or m.get("role"), m.get("value") or m.get("content")) for m in row[columns[0]]]
            chat = {"messages": [{"role": _ROLE_OF_NAME.get(name, name), "content": text} for name, text in pairs]}
        else:
            chat = {column: row[column] for column in columns}
        first, *_ = chat
        if row.get("system"):
            chat[first] = [{"role": "system", "content": row["system"]}, *chat[first]]
        chat = {
            column: [{"content": "", **remove_none_values(m)} for m in messages] for column, messages in chat.items()
        }
        for column in beside:
            is_object = isinstance(row[column], dict | list)
            chat[column] = remove_none_values(row[column]) if is_object else row[column]
        return chat

    beside = [column for column in ("tools", "chat_template_kwargs") if column in rows.column_names]
    names = columns if columns[0] == "prompt" else ("messages",)
    features = {**{name: List(Json()) for name in names}, **{column: Json() for column in beside}}
    return rows.map(as_chat, remove_columns=rows.column_names, features=Features(features), desc="making chats")


def _check_chats(rows: "Dataset", template: str, source: str) -> list[str]:
    """Check the chats of all rows, and return the keys of messages that nothing reads.

    Raises:
        ValueError: If a row has no answer, or a value that would be lost: see `_problem_of`.
    """
    unread = set()
    for number, row in enumerate(rows, start=1):
        messages = row["messages"] if "messages" in row else [*row["prompt"], *row["completion"]]
        held = [key for key in ("tools",) if row.get(key)] + list(row.get("chat_template_kwargs") or {})
        for message in messages:
            keys = {key for key, value in message.items() if value not in (None, "", [])}
            held += [key for key in _WRITTEN if key in keys]
            unread |= {f"messages.{key}" for key in keys if key not in (*_READ, *_WRITTEN, *_EXCLUSIONS)}
        problem = _problem_of(messages, [key for key in held if not re.search(rf"\b{key}\b", template)])
        if problem is not None:
            raise ValueError(f"row {number} of {source!r} has {problem}, or take the row out.")
    return sorted(unread)


def _problem_of(messages: list[dict[str, Any]], unwritten: list[str]) -> str | None:
    """Return what is wrong with a chat, and the remedy; None if it can be learned whole.

    Args:
        unwritten: What the row holds and the template does not write.
    """
    if unwritten:
        return f"{unwritten[0]!r}, which the chat template does not write. Set chat_template_path to one that does"
    for message in messages:
        if message.get("role") not in _ROLES:
            expected = ", ".join(_ROLES)
            return f"the role {message.get('role')!r}, which no template knows; expected one of {expected}. Correct it"
        for key in _EXCLUSIONS:
            if message.get(key) is not None and not message[key]:
                return (
                    f"a message with {key}: {message[key]}, which would leave its text out of the loss; TRL computes the loss of "
                    "every answer. End the chat before the message"
                )
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        return "no answer; expected a message of the assistant. Add it"
    if not all(answer.get("tool_calls") or str(answer.get("content") or "").strip() for answer in answers):
        return "an empty answer; expected text. Fill it in"
    return None

"""Rows of instruction data in the formats that TRL reads; what is refused is named by its row, what is not read in a line."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midus_hf.topics.corpus import read_rows, say
from midus_hf.training.early_checks import format_of
from midus_hf.training.sft.chats import (
    EXCLUSIONS,
    OF_CHATS,
    OF_INSTRUCTIONS,
    REASONING,
    as_chat,
    as_texts,
    without_nulls,
)

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

# Keys of messages that every template may read.
_READ = ("role", "content", "name", "tool_call_id")
# Keys of messages that are refused where the template does not write them.
WRITTEN = ("tool_calls", *REASONING)

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


def read_chats(arguments: Any, tokenizer: "PreTrainedTokenizerBase") -> "Dataset":
    """Return the rows of a run as TRL reads them: `messages`, or `prompt` and `completion`, with `tools` where there are any.

    Columns and keys of messages that are not read are named on standard error. The tokenizer gets the template that the arguments
    name, if the rows are chats.
    """
    source = arguments.dataset_name
    rows = read_rows("dataset_name", source, split=arguments.dataset_train_split, name=arguments.dataset_config)
    columns = format_of(source, rows.column_names)
    if not len(rows):
        raise ValueError(f"dataset_name is {source!r}, which has no rows. Add data.")
    beside = OF_INSTRUCTIONS if columns[0] == "instruction" else OF_CHATS
    kept = [column for column in rows.column_names if column in (*columns, *beside)]
    unread = [column for column in rows.column_names if column not in kept]
    template, kind = None, getattr(rows.features[columns[0]], "dtype", None)
    if columns[0] != "prompt" or kind not in ("string", "large_string"):
        set_template(tokenizer, arguments.chat_template_path)
        template = re.sub(r"\{#.*?#\}", "", tokenizer.get_chat_template(), flags=re.DOTALL)
    rows, keys = _converted(rows.select_columns(kept), columns, template, source)
    if unread + keys:
        say(f"dataset_name {source!r}: not read: {', '.join(unread + keys)}")
    return rows


def _converted(
    rows: "Dataset", columns: tuple[str, ...], template: str | None, source: str
) -> tuple["Dataset", list[str]]:
    """Return rows of a format's columns as TRL reads them, and the keys of messages that nothing reads; texts have no template."""
    from datasets import Features, Value

    from midus_hf.topics.readers import JsonText

    unread: set[str] = set()
    # A table has every key in each row of a column of objects, null where the row has none. So chats are stored as JSON.
    filled = {column.name for column in rows.data.schema if "struct<" in str(column.type)}

    def convert(row: Mapping[str, Any], index: int) -> dict[str, Any]:
        row = {column: without_nulls(value) if column in filled else value for column, value in row.items()}
        try:
            if template is None:
                return as_texts(row)
            chat = as_chat(row, columns)
            check_written(chat, template)
        except ValueError as problem:
            raise ValueError(f"row {index + 1} of {source!r} has {problem}, or take the row out.") from problem
        for message in [message for name in messages for message in chat[name]]:
            held = [key for key, value in message.items() if value not in ("", [])]
            known = (*_READ, *WRITTEN, *EXCLUSIONS)
            unread.update(f"messages.{key}" for key in held if key not in known and not reads_key(template, key))
        return {column: JsonText().encode_example(value) for column, value in chat.items()}

    messages = columns if columns[0] == "prompt" else ("messages",)
    kept = [column for column in ("tools", "chat_template_kwargs") if column in rows.column_names and template]
    features = {name: JsonText() if template else Value("string") for name in messages}
    converted = rows.map(
        convert,
        with_indices=True,
        remove_columns=rows.column_names,
        features=Features({**features, **{column: JsonText() for column in kept}}),
        load_from_cache_file=False,
        desc="reading rows",
    )
    return converted, sorted(unread)


def set_template(tokenizer: "PreTrainedTokenizerBase", named: str | None) -> None:
    """Give a tokenizer the template that a person names: "chatml", or a file with a Jinja template; None keeps its own."""
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


def check_written(chat: Mapping[str, Any], template: str) -> None:
    """Raise a `ValueError` if a template does not name a variable or a key of a message that a chat has beside its texts."""
    variables = [*(["tools"] if chat.get("tools") else []), *(chat.get("chat_template_kwargs") or {})]
    messages = [message for column in ("messages", "prompt", "completion") for message in chat.get(column, ())]
    keys = [key for key in WRITTEN if any(message.get(key) for message in messages)]
    unwritten = [key for key in variables if not re.search(rf"\b{re.escape(key)}\b", template)]
    unwritten += [key for key in keys if not reads_key(template, key)]
    if unwritten:
        raise ValueError(
            f"{unwritten[0]!r}, which the chat template does not write. Set chat_template_path to one that does"
        )


def reads_key(template: str, key: str) -> bool:
    """Return whether a template reads a key of messages, which differs from text such as `<thinking>` and from a variable."""
    return re.search(rf"[.'\"]{re.escape(key)}\b", template) is not None

"""Rows of instruction data in the formats that TRL reads; what is refused is named by its row, what is not read in a line."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from midus_hf.topics.corpus import read_rows, say
from midus_hf.training.early_checks import format_of, no_format
from midus_hf.training.sft.chats import (
    EXCLUSIONS,
    OF_CHATS,
    OF_INSTRUCTIONS,
    as_chat,
    as_texts,
    check_numbers,
    without_nulls,
)
from midus_hf.training.sft.template import WRITTEN, check_written, reads_key, set_template

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

# Keys of messages that every template may read.
_READ = ("role", "content", "name", "tool_call_id")


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
    columns = format_of(rows.column_names)
    if columns is None:
        raise no_format(source, rows.column_names)
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
            check_numbers(chat)
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

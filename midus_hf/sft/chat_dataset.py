"""Sequences of a run: rows of data read, turned into tokens on all cores, and cut to a length, perhaps packed."""

import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import re
import signal
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl import pack_dataset

from midus_hf.files.json_text import parse_json
from midus_hf.sft.formats import Chat, Format, detect_format, format_named, read_example
from midus_hf.sft.labels import Tokens, encode, set_template
from midus_hf.sft.options import SftConfig
from midus_hf.topics.documents import json_line_rows, parquet_rows
from midus_hf.topics.text_files import DocumentError, endings, first_line, import_datasets, read_text, walk_files

_DATASET_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")

# Endings of files that hold rows. All but `.parquet` may be followed by the ending of a compression.
ENDINGS = (".jsonl", ".json", ".parquet")


def iterate_rows(config: SftConfig) -> Iterator[tuple[str, Any]]:
    """Return an iterator over the rows of the data, each with its location, for messages.

    Args:
        config: Options of the run; only the keys that begin with `dataset_` are read.

    Raises:
        DocumentError: If `dataset_name` names no data, a folder has no files of rows, or a file cannot be read.
    """
    path = Path(config.dataset_name).expanduser()
    if not path.exists() and not _holds_rows(path):
        rows = load_hub_dataset("dataset_name", config.dataset_name, config.dataset_config, config.dataset_train_split)
        return ((f"row {number} of {config.dataset_name!r}", row) for number, row in enumerate(rows, start=1))
    if config.dataset_config is not None:
        raise DocumentError(
            f"dataset_name is {config.dataset_name!r}, which is local; dataset_config is for datasets of the Hub."
        )
    return (row for file in _find_files(path) for row in _read_file(file, config.dataset_encoding))


def _find_files(path: Path) -> list[Path]:
    if not path.exists():
        raise DocumentError(
            f"dataset_name is {str(path)!r}, which does not exist; expected a file, a folder or a dataset id."
        )
    if path.is_file():
        if not _holds_rows(path):
            raise DocumentError(f"dataset_name is {str(path)!r}; expected a file ending in {', '.join(ENDINGS)}.")
        return [path]
    files = [file for file in walk_files(path) if _holds_rows(file) and not file.is_dir()]
    if not files:
        raise DocumentError(
            f"dataset_name is {str(path)!r}, a folder without rows; expected files ending in {', '.join(ENDINGS)}."
        )
    return files


def _holds_rows(path: Path) -> bool:
    suffix, compression = endings(path)
    return suffix in ENDINGS and not (compression and suffix == ".parquet")


def _read_file(path: Path, encoding: str) -> Iterator[tuple[str, Any]]:
    suffix, compression = endings(path)
    if suffix == ".parquet":
        return parquet_rows(path)
    # Published corpora name JSON lines .json.gz. A plain .json file is one list if it begins with a bracket.
    if suffix == ".jsonl" or compression:
        return json_line_rows(path, encoding)
    text = read_text(path, encoding)
    return _rows_of_list(path, text) if text.lstrip().startswith("[") else json_line_rows(path, encoding)


def _rows_of_list(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    try:
        rows = parse_json(text)
    except ValueError as error:
        raise DocumentError(f"file {str(path)!r} is not JSON: {error}. Expected a list of objects.") from error
    return ((f"row {number} of {str(path)!r}", row) for number, row in enumerate(rows, start=1))


# Number of rows held in memory at a time.
_ROWS_AT_A_TIME = 4096
_ROWS_WORTH_PROCESSES = 512


@dataclasses.dataclass(frozen=True)
class _Encoder:
    tokenizer: PreTrainedTokenizerBase
    row_format: Format

    def __call__(self, located_row: tuple[str, Any]) -> Tokens:
        location, row = located_row
        return encode(self.tokenizer, read_example(self.row_format, row, location), location)


# Encoder that a forked process inherits; sending it with its tokenizer would take long.
_encoder: _Encoder | None = None


def encode_rows(
    tokenizer: PreTrainedTokenizerBase, rows: Iterator[tuple[str, Any]], format: str | None, template: str | None
) -> Iterator[Tokens]:
    """Turn rows into tokens, in the order of the rows.

    Call this function before processes are connected or a GPU is used, since the function forks the process.

    Args:
        tokenizer: A fast tokenizer; it gets the chosen chat template.
        format: Name of the format, as in `SftConfig.dataset_format`; None detects it from the columns of the first row.
        template: Chat template, as in `SftConfig.chat_template`.

    Raises:
        DocumentError: If `read_example` or `encode` raises it.
        ValueError: If `format_named` or `set_template` raises it.
    """
    row_format = None if format is None else format_named(format)
    first = list(itertools.islice(rows, 1))
    for location, row in first:
        row_format = row_format or detect_format(row, location)
        if template is not None or isinstance(read_example(row_format, row, location), Chat):
            set_template(tokenizer, template)
    if row_format is None:
        return
    encoder, rows = _Encoder(tokenizer, row_format), itertools.chain(first, rows)
    while block := list(itertools.islice(rows, _ROWS_AT_A_TIME)):
        yield from _encode_block(encoder, block)


def _encode_block(encoder: _Encoder, block: list[tuple[str, Any]]) -> list[Tokens]:
    global _encoder
    if len(block) < _ROWS_WORTH_PROCESSES or usable_cores() == 1:
        return [encoder(row) for row in block]
    _encoder = encoder
    try:
        pools = multiprocessing.get_context("fork")
        with without_threads_of_tokenizers(), pools.Pool(usable_cores(), initializer=_end_when_told) as pool:
            tokens = pool.map(_encode_in_fork, block, chunksize=64)
            # The context manager would kill the workers, perhaps one that holds a lock which another waits for.
            pool.close()
            pool.join()
            return tokens
    finally:
        _encoder = None


def _end_when_told() -> None:
    """Let SIGTERM end a worker at once: an inherited Python handler is not called while a worker waits for a lock."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _encode_in_fork(located_row: tuple[str, Any]) -> Tokens:
    assert _encoder is not None
    return _encoder(located_row)


NO_LABEL = -100


@dataclasses.dataclass
class ChatDataset:
    """Sequences made from the data of a run, with counts of what was read and left out.

    Args:
        dataset: Rows with `input_ids` and `labels`, and `seq_lengths` if packed.
        rows: Number of rows that were read.
        examples: Number of examples that the run trains on.
        tokens: Number of tokens of these examples.
        labels: Number of these tokens that have a loss.
        cut: Number of these examples that were longer than a sequence.
        without_answer: Number of rows left out because they have no answer, or none within a sequence.
        last_token: Id of the token that ends the first whole chat; None if the data is plain text, or no chat is whole.
        ends: Whether `last_token` is special, so that generation can stop at it; true if `last_token` is None.
    """

    dataset: Dataset
    rows: int
    examples: int
    tokens: int
    labels: int
    cut: int
    without_answer: int
    last_token: int | None
    ends: bool

    def describe(self, config: SftConfig) -> list[str]:
        """Return sentences about what was read, left out and made."""
        lines = [
            f"{self.examples:,} examples, {self.tokens:,} tokens, {self.labels:,} of them with a loss "
            f"({self.labels / self.tokens:.1%})"
        ]
        if self.cut:
            lines.append(f"{self.cut:,} were longer than {config.max_length:,} tokens and were cut there")
        if self.without_answer:
            lines.append(f"{self.without_answer:,} of {self.rows:,} rows were left out: no answer within a sequence")
        if not self.ends:
            lines.append("the chat template ends answers with no special token, so the model will not learn to stop")
        if config.packing:
            filled = self.tokens / (len(self.dataset) * config.max_length)
            lines.append(f"packed into {len(self.dataset):,} sequences, {filled:.1%} full")
        return lines


def build_chat_dataset(config: SftConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> ChatDataset:
    """Read the data of a run and turn it into sequences.

    Args:
        tokenizer: Tokenizer of the model; it gets the chat template that the options name.

    Raises:
        DocumentError: If the data cannot be read, or holds no answer.
        ValueError: If there is no chat template, the tokenizer cannot report which characters each token covers, or an
            id is too large for the model's embeddings.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"the tokenizer is a {type(tokenizer).__name__}, which does not tell where in a text its tokens come from; expected "
            "one with a tokenizer.json."
        )
    ids, labels, lengths = array("i"), array("i"), array("q", [0])
    rows = cut = without_answer = 0
    last_token: int | None = None
    for tokens in encode_rows(tokenizer, iterate_rows(config), config.dataset_format, config.chat_template):
        rows += 1
        if tokens.ids and max(tokens.ids) >= vocab_size:
            raise ValueError(
                f"the tokenizer makes id {max(tokens.ids)}, but the model embeds {vocab_size}; expected the model's own."
            )
        kept = tokens.cut(config.max_length)
        # No token predicts the first one of a sequence, so only later tokens can have a loss.
        if not any(kept.in_answer[1:]):
            without_answer += 1
            continue
        if last_token is None and tokens.is_chat and len(kept.ids) == len(tokens.ids):
            last_token = [token for token, inside in zip(kept.ids, kept.in_answer, strict=True) if inside][-1]
        cut += len(kept.ids) < len(tokens.ids)
        ids.extend(kept.ids)
        labels.extend(
            token if inside or not config.assistant_only_loss else NO_LABEL
            for token, inside in zip(kept.ids, kept.in_answer, strict=True)
        )
        lengths.append(len(ids))
    if len(lengths) == 1:
        raise DocumentError(
            f"dataset_name is {config.dataset_name!r}, which has {rows:,} rows and no answer to learn from within "
            f"{config.max_length:,} tokens. Add data, or raise max_length."
        )
    with_loss = sum(label != NO_LABEL for label in labels)
    dataset = _as_dataset(ids, labels, lengths)
    if config.packing:
        dataset = pack_dataset(dataset, config.max_length)
    ends = last_token is None or is_special(tokenizer, last_token)
    return ChatDataset(dataset, rows, len(lengths) - 1, len(ids), with_loss, cut, without_answer, last_token, ends)


def is_special(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """Return whether a token is a special mark rather than text."""
    added_tokens = tokenizer.added_tokens_decoder
    return token in tokenizer.all_special_ids or (token in added_tokens and added_tokens[token].special)


def _as_dataset(ids: array, labels: array, ends: array) -> Dataset:
    def column(values: array) -> pyarrow.Array:
        return pyarrow.LargeListArray.from_arrays(np.asarray(ends), np.asarray(values))

    return Dataset(pyarrow.table({"input_ids": column(ids), "labels": column(labels)}))


def load_hub_dataset(name: str, path: str, config: str | None, split: str, streaming: bool = False) -> Any:
    """Load a dataset from the Hub.

    Args:
        config: Configuration of the dataset; None for its default.

    Raises:
        DocumentError: If the dataset does not exist or cannot be loaded, or the package `datasets` is not installed.
    """
    if not _DATASET_ID.fullmatch(path):
        raise _absent(name, path)
    datasets = import_datasets(f"{name} {path!r}")
    try:
        return datasets.load_dataset(path, config, split=split, streaming=streaming)
    except (OSError, ValueError, RuntimeError) as error:
        raise DocumentError(
            f"{name} is {path!r}, which is no file or folder and cannot be loaded as a dataset: {first_line(error)}"
        ) from error


def _absent(name: str, path: str) -> DocumentError:
    return DocumentError(f"{name} is {path!r}, which does not exist; expected a file, a folder or a dataset id.")


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def without_threads_of_tokenizers() -> Iterator[None]:
    """Limit tokenizers to one thread per process inside the context, since there is one process per core."""
    name = "TOKENIZERS_PARALLELISM"
    value_before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if value_before is None:
            del os.environ[name]
        else:
            os.environ[name] = value_before

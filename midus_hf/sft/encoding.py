"""Tokenisation of rows on all cores."""

import itertools
import multiprocessing
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from midus_hf.sft.formats import Chat, Format, detect_format, format_named, read_example
from midus_hf.sft.labels import Tokens, encode
from midus_hf.sft.templates import set_template
from midus_hf.training.data.corpus import usable_cores
from midus_hf.training.data.token_cache import without_threads_of_tokenizers

# Number of rows held in memory at a time.
_ROWS_AT_A_TIME = 4096
_ROWS_WORTH_PROCESSES = 512


@dataclass(frozen=True)
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
        rows: Each row with its location, for messages.
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

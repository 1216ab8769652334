"""Rows as tokens, on all cores."""

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

_ROWS_AT_A_TIME = 4096
"""Rows that are held at a time."""
_ROWS_WORTH_PROCESSES = 512


@dataclass(frozen=True)
class _Encoder:
    tokenizer: PreTrainedTokenizerBase
    known: Format

    def __call__(self, placed: tuple[str, Any]) -> Tokens:
        place, row = placed
        return encode(self.tokenizer, read_example(self.known, row, place), place)


_encoder: _Encoder | None = None
"""That of a process which was forked to use it: with its tokenizer it would take long to send."""


def encode_rows(
    tokenizer: PreTrainedTokenizerBase, rows: Iterator[tuple[str, Any]], format: str | None, template: str | None
) -> Iterator[Tokens]:
    """Turn rows into tokens, in their order.

    To be called before processes know of each other or of a GPU: it forks.

    Args:
        tokenizer: A fast one; it is given the template that is asked for.
        rows: Each with where it is, for messages.
        format: As `SftConfig.dataset_format`; None for what the columns of the first row say.
        template: As `SftConfig.chat_template`.

    Raises:
        DocumentError: As `read_example` and `encode`.
        ValueError: As `set_template`.
    """
    known = None if format is None else format_named(format)
    first = list(itertools.islice(rows, 1))
    for place, row in first:
        known = known or detect_format(row, place)
        if template is not None or isinstance(read_example(known, row, place), Chat):
            set_template(tokenizer, template)
    if known is None:
        return
    encoder, rows = _Encoder(tokenizer, known), itertools.chain(first, rows)
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
            # Left to the context, workers would be killed, one perhaps while it holds the lock that another waits for.
            pool.close()
            pool.join()
            return tokens
    finally:
        _encoder = None


def _end_when_told() -> None:
    """Let SIGTERM end a worker at once: a handler of Python, which it inherits, is not called while a worker waits for a lock."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _encode_in_fork(placed: tuple[str, Any]) -> Tokens:
    assert _encoder is not None
    return _encoder(placed)

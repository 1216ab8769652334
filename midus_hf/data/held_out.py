"""Documents that a run holds out of training to measure what it learned, chosen by their text."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from midus_hf.config.errors import print_note
from midus_hf.sources.progress import show_progress

if TYPE_CHECKING:
    from datasets import Dataset

# At most this share of the sequences that a run trains on is measured, but no fewer than `MIN_MEASURED`: 3 % of the run's time.
MEASURED_SHARE, MIN_MEASURED = 0.05, 16
_ROWS_AT_ONCE = 1000
_CHARACTERS_PER_TOKEN = 8  # of most texts, with some to spare
# A stream is read for held-out texts until so many times the characters have been read that have them on average.
_PATIENCE = 3


def belongs_to_share(text: str, share: float) -> bool:
    """Return whether a text is among a share of all texts, decided by its SHA-256, whatever its place."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8]) < share * 2**64


def document_text(row: Mapping[str, Any], columns: Sequence[str]) -> str:
    """Return what identifies a row: its text, or the JSON of several columns, such as those of a chat."""
    if len(columns) == 1 and isinstance(row[columns[0]], str):
        return row[columns[0]]
    return json.dumps({name: row[name] for name in columns}, sort_keys=True, ensure_ascii=False, default=str)


def split_held_out(rows: "Dataset", share: float, columns: Sequence[str]) -> tuple["Dataset", "Dataset"]:
    """Return the rows to train on, and those that are held out; `columns` identify a row."""
    is_held = np.zeros(len(rows), bool)
    read = rows.select_columns(list(columns))
    for place in show_progress(range(0, len(rows), _ROWS_AT_ONCE), desc="holding out", leave=False):
        for number, row in enumerate(read.select(range(place, min(place + _ROWS_AT_ONCE, len(rows)))), place):
            is_held[number] = belongs_to_share(document_text(row, columns), share)
    return rows.select(np.flatnonzero(~is_held)), rows.select(np.flatnonzero(is_held))


def read_held_out_rows(
    stream: Iterable[Mapping[str, Any]], share: float, column: str, num_tokens: int
) -> list[Mapping[str, Any]]:
    """Return a stream's first held-out rows, about as many as have `num_tokens`; few if its texts are few."""
    held_out: list[Mapping[str, Any]] = []
    enough = _CHARACTERS_PER_TOKEN * num_tokens
    num_read = num_held = 0
    for row in stream:
        text = row[column]
        if not isinstance(text, str) or not text.strip():
            continue
        num_read += len(text)
        if belongs_to_share(text, share):
            num_held += len(text)
            held_out.append(row)
        if num_held >= enough or num_read * share >= _PATIENCE * enough:
            break
    return held_out


def choose_measured(sequences: "Dataset", num_trained: int) -> "Dataset":
    """Return sequences at equal distances, at most `MEASURED_SHARE` of those that a run trains on, or `MIN_MEASURED`."""
    count = min(len(sequences), max(MIN_MEASURED, round(MEASURED_SHARE * num_trained)))
    return sequences.select(np.linspace(0, len(sequences) - 1, count).round().astype(int))


def note_nothing_held_out(key: str, reason: str) -> None:
    """Print that a run measures nothing, and why."""
    remedy = "give held-out texts by eval_text, or raise eval_share"
    print_note(f"{key}: {reason}, so what the run learns is not measured; {remedy}")

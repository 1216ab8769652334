"""Documents of a corpus: from a file, a folder of files, or a dataset of the Hub."""

import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from midus_hf.training.options import CorpusOptions

ROW_SUFFIXES = (".jsonl", ".parquet")
FOLDER_SUFFIXES = (".txt", ".md", *ROW_SUFFIXES)
"""Endings of the files that are read from a folder."""

_DATASET_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class CorpusError(ValueError):
    """A corpus that cannot be trained on."""


def open_corpus(options: CorpusOptions, seed: int = 0) -> Callable[[], Iterator[str]]:
    """Find the corpus; what is returned reads it from the start each time it is called.

    Documents without any visible character are left out.

    Args:
        options: Where the text comes from.
        seed: Seed of the order in which a streamed dataset is read, if it is shuffled. Default: 0.

    Raises:
        CorpusError: If there is no such corpus or it has no files to read. Reading raises it too: for what is not
            text, for rows without the column, and for JSON lines that are not JSON.
    """
    path = Path(options.path).expanduser()
    if path.exists():
        if options.config is not None or options.shuffle_buffer:
            raise CorpusError(
                f"corpus is {options.path!r}, which is local; config and shuffle_buffer are for datasets of the Hub."
            )
        files = _find_files(path)
        return lambda: _visible(document for file in files for document in _read_file(file, options))
    if not _DATASET_ID.fullmatch(options.path) or path.suffix in FOLDER_SUFFIXES:
        raise CorpusError(
            f"corpus is {options.path!r}, which does not exist; expected a file, a folder or a dataset id."
        )
    dataset = _load_dataset(options, seed)
    return lambda: _visible(_column(row, options.column, f"corpus {options.path!r}") for row in dataset)


def _find_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = sorted(
        Path(folder, name)
        for folder, _, names in os.walk(path)
        for name in names
        if Path(name).suffix in FOLDER_SUFFIXES and not name.startswith(".")
    )
    if not files:
        raise CorpusError(
            f"corpus is {str(path)!r}, a folder without text; expected files ending in {', '.join(FOLDER_SUFFIXES)}."
        )
    return files


def _visible(documents: Iterator[str]) -> Iterator[str]:
    return (document for document in documents if document.strip())


def _read_file(path: Path, options: CorpusOptions) -> Iterator[str]:
    if path.suffix == ".parquet":
        datasets = _import_datasets(str(path))
        try:
            rows = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
            yield from (_column(row, options.column, f"file {str(path)!r}") for row in rows)
        except (OSError, ValueError, RuntimeError) as error:
            if isinstance(error, CorpusError):
                raise
            raise CorpusError(
                f"file {str(path)!r} is no readable Parquet: {_first_line(error)}. Write it again."
            ) from error
    elif path.suffix == ".jsonl":
        yield from _read_json_lines(path, options)
    else:
        yield _decode(path, path.read_bytes(), options.encoding)


def _read_json_lines(path: Path, options: CorpusOptions) -> Iterator[str]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"line {number} of {str(path)!r}"
            try:
                row = json.loads(_decode(path, line, options.encoding))
            except json.JSONDecodeError as error:
                raise CorpusError(f"{place} is not JSON: {error}. Expected one object a line.") from error
            yield _column(row, options.column, place)


def _decode(path: Path, data: bytes, encoding: str) -> str:
    """Decode `data`; zero bytes pass for UTF-8 but are in no text."""
    try:
        text = data.decode("utf-8-sig" if encoding.lower() in ("utf-8", "utf8") else encoding)
    except LookupError as error:
        raise CorpusError(
            f"corpus.encoding is {encoding!r}, which Python does not know; expected e.g. 'utf-8'."
        ) from error
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"file {str(path)!r} is not text in {encoding}: {error.reason} at byte {error.start}. "
            "Take it out, convert it, or set corpus.encoding."
        ) from error
    if "\0" in text:
        raise CorpusError(f"file {str(path)!r} is not text: it has zero bytes. Take it out, or set corpus.encoding.")
    return text


def _column(row: Any, column: str, place: str) -> str:
    if not isinstance(row, dict) or column not in row:
        found = f"only {', '.join(map(str, row))}" if isinstance(row, dict) else f"a {type(row).__name__}"
        raise CorpusError(f"{place} has no {column!r}, {found}; set corpus.column to the one that holds the text.")
    if not isinstance(row[column], str):
        raise CorpusError(f"{place} has a {type(row[column]).__name__} under {column!r}; expected text.")
    return row[column]


def _import_datasets(wanted_by: str):
    if importlib.util.find_spec("datasets") is None:
        raise CorpusError(
            f"corpus {wanted_by!r} needs the package datasets; install it with pip install 'midus-hf[train]'."
        )
    import datasets

    return datasets


def _load_dataset(options: CorpusOptions, seed: int):
    datasets = _import_datasets(options.path)
    try:
        dataset = datasets.load_dataset(options.path, options.config, split=options.split, streaming=options.streaming)
    except (OSError, ValueError, RuntimeError) as error:
        raise CorpusError(
            f"corpus is {options.path!r}, no file or folder here, and not to be had as a dataset: {_first_line(error)}"
        ) from error
    return dataset.shuffle(seed=seed, buffer_size=options.shuffle_buffer) if options.shuffle_buffer else dataset


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

"""The windows of a corpus on disk: their embeddings, documents and labels, written once and resumed after an interruption.

Windows are embedded a stretch at a time, and a stretch that is done is on the disk before the next begins, so what an
interrupted run has left goes on with the same stretches, and ends in the same bytes.
"""

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from transformers import PreTrainedTokenizerBase

from clusters.corpus import Corpus, Document, Window, cut_windows, read_corpus
from clusters.growing_array import GrowingArray
from midus_hf.documents import find_files, first_line
from midus_hf.retrieval import TextEmbedder

DTYPES = ("float16", "float32")
_STRETCH = 1024
"""Windows that are embedded between two records of how far it is."""

_VERSION = 1
_RECORD = "windows.json"


@dataclass(frozen=True)
class StoredWindows:
    """What is on the disk of a corpus, mapped and not read.

    Args:
        embeddings: `[N, c]` float16 or float32, a row a window, in the order of the corpus.
        documents: The number of the document of each window, `[N]` int64.
        labels: The label of each window, a place in `label_names`, `[N]` int32; None where the corpus has none.
        label_names: The labels, in the order in which they first appear.
        corpus: Where the documents were.
    """

    embeddings: np.ndarray
    documents: np.ndarray
    labels: np.ndarray | None
    label_names: list[str]
    corpus: Corpus


def store_windows(
    folder: Path,
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    embedder: TextEmbedder,
    window_tokens: int = 2048,
    dtype: str = "float32",
) -> StoredWindows:
    """Embed the windows of a corpus into a folder, or as many of them as are not there yet.

    Args:
        folder: Where to; it is made.
        corpus: The documents.
        tokenizer: From `load_fast_tokenizer`; cuts windows.
        embedder: Embeds them.
        window_tokens: Tokens of a window. Default: 2048.
        dtype: What embeddings are kept as, `"float16"` or `"float32"`. Default: `"float32"`.

    Raises:
        ValueError: If the folder holds the windows of another request or is being written by another run, an option is out of
            range, or the corpus cannot be read or is empty.
    """
    if window_tokens < 1:
        raise ValueError(f"window_tokens is {window_tokens}; expected at least 1.")
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; expected {' or '.join(DTYPES)}.")
    request = _request(corpus, tokenizer, embedder, window_tokens, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            record = _read_record(folder) or _Record(request)
            _check_request(folder, record.request, request)
            if not record.complete:
                _write(folder, record, corpus, tokenizer, embedder)
    except Timeout as error:
        raise ValueError(
            f"folder {str(folder)!r} is being written by another run; wait for it, or choose another."
        ) from error
    return open_windows(folder)


def open_windows(folder: Path) -> StoredWindows:
    """Map what `store_windows` has written.

    Args:
        folder: Where it is.

    Raises:
        ValueError: If it is not there, or not complete.
    """
    record = _read_record(folder)
    if record is None or not record.complete:
        raise ValueError(
            f"folder {str(folder)!r} holds no windows, or not all of a corpus; expected those of a tree. Run midus-cluster build."
        )
    labelled = record.request["label_column"] is not None
    corpus = Corpus(*(record.request[key] for key in ("corpus", "column", "label_column", "encoding")))
    return StoredWindows(
        embeddings=map_array(folder / "embeddings.npy", record.windows),
        documents=map_array(folder / "documents.npy", record.windows),
        labels=map_array(folder / "labels.npy", record.windows) if labelled else None,
        label_names=record.label_names,
        corpus=corpus,
    )


def map_array(path: Path, rows: int, remedy: str = "Delete its folder, and build again.") -> np.ndarray:
    """Map an array that has a row for each window.

    Args:
        path: A `.npy` file.
        rows: How many it must have.
        remedy: What is said to do about it. Default: to delete its folder.

    Raises:
        ValueError: If it is absent or not whole, or has another number of rows.
    """
    try:
        found = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"file {str(path)!r} is absent or not whole: {first_line(error)}. {remedy}") from error
    if len(found) != rows:
        raise ValueError(
            f"file {str(path)!r} has {len(found):,} rows; expected {rows:,}, one for each window. {remedy}"
        )
    return found


@dataclass
class _Record:
    """How far it is: what is behind the last stretch that is whole."""

    request: dict[str, Any]
    windows: int = 0
    last_document: int = -1
    last_number: int = -1
    label_names: list[str] = field(default_factory=list)
    complete: bool = False


def _request(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, embedder: TextEmbedder, window_tokens: int, dtype: str
) -> dict[str, Any]:
    """All that embeddings depend on, but for the rounding of batches."""
    path = Path(corpus.path).expanduser()
    files = hashlib.sha256()
    for file in find_files(corpus.path):
        status = file.stat()
        files.update(json.dumps([str(file.relative_to(path)), status.st_size, status.st_mtime_ns]).encode())
    return {
        "version": _VERSION,
        "corpus": str(path.resolve()),
        "files": files.hexdigest(),
        "column": corpus.column,
        "label_column": corpus.label_column,
        "encoding": corpus.encoding,
        "tokenizer": _fingerprint(tokenizer),
        "embedding_model": embedder.fingerprint,
        "max_tokens": embedder.max_tokens,
        "window_tokens": window_tokens,
        "dtype": dtype,
    }


def _fingerprint(tokenizer: Any) -> str:
    """Of all that decides where tokens begin; what an earlier call has left of truncation and padding is no part of it."""
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    kept = {key: value for key, value in settings.items() if key not in ("truncation", "padding")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _check_request(folder: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for key, value in wanted.items():
        if key != "corpus" and found.get(key) != value:
            raise ValueError(
                f"folder {str(folder)!r} holds windows that were made with another {key}, {found.get(key)!r}; expected {value!r}. "
                "Choose another output, or delete this folder."
            )


def _write(
    folder: Path, record: _Record, corpus: Corpus, tokenizer: PreTrainedTokenizerBase, embedder: TextEmbedder
) -> None:
    from tqdm import tqdm

    names = {name: place for place, name in enumerate(record.label_names)}
    with contextlib.ExitStack() as stack:

        def array(name: str, dtype: str, width: int | None = None) -> GrowingArray:
            return stack.enter_context(
                contextlib.closing(GrowingArray(folder / f"{name}.npy", dtype, width, record.windows))
            )

        embeddings = array("embeddings", record.request["dtype"], embedder.width)
        documents = array("documents", "int64")
        labels = array("labels", "int32") if corpus.label_column is not None else None
        bar = stack.enter_context(tqdm(desc="embedding", unit=" windows", initial=record.windows, disable=None))
        windows = _remaining(
            cut_windows(_from_document(corpus, record.last_document), tokenizer, _tokens(record)), record
        )
        while stretch := list(itertools.islice(windows, _STRETCH)):
            embeddings.append(embedder.embed([window.text for window in stretch], bar.update).numpy())
            documents.append(np.array([window.document.number for window in stretch]))
            if labels is not None:
                of_stretch = [window.document.label for window in stretch]
                labels.append(np.array([names.setdefault(str(label), len(names)) for label in of_stretch]))
            for written in (embeddings, documents, labels):
                if written is not None:
                    written.flush()
            record.windows = embeddings.rows
            record.last_document, record.last_number = stretch[-1].document.number, stretch[-1].number
            record.label_names = list(names)
            _write_record(folder, record)
    if not record.windows:
        raise ValueError(f"corpus {corpus.path!r} has no document with a visible character. Add text to it.")
    record.complete = True
    _write_record(folder, record)


def _tokens(record: _Record) -> int:
    return int(record.request["window_tokens"])


def _from_document(corpus: Corpus, first: int) -> Iterator[Document]:
    return (document for document in read_corpus(corpus) if document.number >= first)


def _remaining(windows: Iterator[Window], record: _Record) -> Iterator[Window]:
    done = (record.last_document, record.last_number)
    return (window for window in windows if (window.document.number, window.number) > done)


def _read_record(folder: Path) -> _Record | None:
    path = folder / _RECORD
    if not path.is_file():
        return None
    try:
        return _Record(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"file {str(path)!r} was altered or is not whole. Delete its folder, and build again."
        ) from error


def _write_record(folder: Path, record: _Record) -> None:
    partial = folder / f".{_RECORD}.partial"
    partial.write_text(json.dumps(vars(record), indent=2) + "\n", encoding="utf-8")
    os.replace(partial, folder / _RECORD)

"""The windows of a corpus in a folder, embedded once into one mapped array, with the document and the label of each."""

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock, Timeout
from transformers import PreTrainedTokenizerBase

from midus_hf.files.json_text import parse_json
from midus_hf.files.whole_files import whole_file
from midus_hf.topics.corpus import Corpus, Window, cut_windows, read_corpus
from midus_hf.topics.embedding import TextEmbedder
from midus_hf.topics.text_files import find_files, first_line

DTYPES = ("float16", "float32")
# Windows that are embedded at a time, and then reach the disk.
_STRETCH = 1024
_VERSION = 3
_RECORD, _EMBEDDINGS, _DOCUMENTS, _LABELS = "windows.json", "embeddings.npy", "documents.npy", "labels.npy"


@dataclass(frozen=True)
class StoredWindows:
    """The windows of a corpus in a folder, memory-mapped.

    Args:
        embeddings: Embeddings `[N, c]`, float16 or float32, one row per window, in the order of the corpus.
        documents: Number of the document of each window, `[N]`, int64.
        labels: Label of each window as an index into `label_names`, `[N]`, int32; None if the corpus has no labels.
        label_names: The labels, in the order of their first appearance.
        corpus: Location of the documents.
        fingerprint: Fingerprint of the request and of the number of windows.
    """

    embeddings: np.ndarray
    documents: np.ndarray
    labels: np.ndarray | None
    label_names: list[str]
    corpus: Corpus
    fingerprint: str


def store_windows(
    folder: Path,
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    embedder: TextEmbedder,
    window_tokens: int = 2048,
    dtype: str = "float32",
) -> StoredWindows:
    """Embed the windows of a corpus into a folder, and return them. Windows that the folder has are not embedded again.

    Windows are embedded in stretches, each of which reaches the disk before the next begins. A run that goes on after an
    interruption has the same stretches, and so ends in the same bytes.

    Raises:
        ValueError: If the folder holds windows of another request or another run is writing to it, an option is out of
            range, or the corpus cannot be read or is empty.
    """
    from tqdm import tqdm

    request = _request(corpus, tokenizer, embedder, window_tokens, dtype)
    with only_run(folder):
        record = _read_record(folder) or {"request": request, "windows": None, "label_names": []}
        for key, value in request.items():
            if key != "corpus" and record["request"].get(key) != value:  # files may be moved
                raise ValueError(
                    f"folder {str(folder)!r} holds windows that were made with another {key}, {record['request'].get(key)!r}; "
                    f"expected {value!r}. Choose another output, or delete this folder."
                )
        if record["windows"] is None:
            _write_record(folder, record)
            windows = cut_windows(read_corpus(corpus), tokenizer, window_tokens)
            with tqdm(desc="embedding", unit=" windows", disable=None) as bar:
                documents, labels = _embed(folder / _EMBEDDINGS, windows, embedder, dtype, bar.update)
            if not documents:
                (folder / _RECORD).unlink()
                raise ValueError(f"corpus {corpus.path!r} has no document with a visible character. Add text to it.")
            write_array(folder / _DOCUMENTS, np.array(documents, np.int64))
            names = list(dict.fromkeys(labels))
            if corpus.label_column is not None:
                numbers = {name: number for number, name in enumerate(names)}
                write_array(folder / _LABELS, np.array([numbers[label] for label in labels], np.int32))
                record["label_names"] = names
            _write_record(folder, {**record, "windows": len(documents)})
    return open_windows(folder)


def _embed(
    path: Path,
    windows: Iterator[Window],
    embedder: TextEmbedder,
    dtype: str,
    progress: Callable[[int], object],
) -> tuple[list[int], list[Any]]:
    """Write the embeddings of windows to a `.npy` file, and return the document and the label of each window."""
    documents: list[int] = []
    labels: list[Any] = []
    path.touch()
    with path.open("r+b") as file:
        begin = _write_header(file, dtype, 0, embedder.width)
        stretch_bytes = _STRETCH * embedder.width * np.dtype(dtype).itemsize
        # After a crash the file may lack the bytes of its last stretch, which is therefore embedded again.
        kept = max(0, (path.stat().st_size - begin) // stretch_bytes - 1)
        file.truncate(begin + kept * stretch_bytes)
        file.seek(0, os.SEEK_END)
        while stretch := list(itertools.islice(windows, _STRETCH)):
            if len(documents) < kept * _STRETCH:
                progress(len(stretch))
            else:
                rows = embedder.embed([window.text for window in stretch], progress).numpy()
                file.write(rows.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
                file.flush()
                os.fsync(file.fileno())
            documents += [window.document.number for window in stretch]
            labels += [window.document.label for window in stretch]
        header_end = _write_header(file, dtype, len(documents), embedder.width)
        assert header_end == begin, "numpy leaves room for a growing first axis"
        os.fsync(file.fileno())
    return documents, labels


def _write_header(file: BinaryIO, dtype: str, rows: int, width: int) -> int:
    """Write the header of a `.npy` file, and return its end."""
    file.seek(0)
    header = {"descr": np.dtype(dtype).newbyteorder("<").str, "fortran_order": False, "shape": (rows, width)}
    np.lib.format.write_array_header_1_0(file, header)
    file.flush()
    return file.tell()


def open_windows(folder: Path) -> StoredWindows:
    """Open the windows that `store_windows` wrote. Windows of a part of a corpus are an error."""
    record = _read_record(folder)
    if record is None or record["windows"] is None:
        raise ValueError(
            f"folder {str(folder)!r} holds no windows, or not all of a corpus; expected the windows of a tree. Run midus cluster "
            "build."
        )
    request, windows = record["request"], record["windows"]
    kept = {key: value for key, value in request.items() if key != "corpus"}
    return StoredWindows(
        embeddings=map_array(folder / _EMBEDDINGS, windows),
        documents=map_array(folder / _DOCUMENTS, windows),
        labels=None if request["label_column"] is None else map_array(folder / _LABELS, windows),
        label_names=record["label_names"],
        corpus=Corpus(*(request[key] for key in ("corpus", "column", "label_column", "encoding"))),
        fingerprint=hashlib.sha256(json.dumps([kept, windows], sort_keys=True).encode()).hexdigest(),
    )


def windows_of_corpus(folder: Path, corpus: Corpus) -> StoredWindows | None:
    """Return the stored windows if they belong to a corpus whose files have not changed since, else None. Labels do not matter."""
    record = _read_record(folder)
    if record is None or record["windows"] is None:
        return None
    wanted = {**_corpus_request(corpus), "label_column": record["request"]["label_column"]}
    return open_windows(folder) if wanted.items() <= record["request"].items() else None


def _request(corpus: Corpus, tokenizer: Any, embedder: TextEmbedder, window_tokens: int, dtype: str) -> dict[str, Any]:
    """Return everything that embeddings depend on, except the rounding of batches, after checking it."""
    if window_tokens < 1:
        raise ValueError(f"window_tokens is {window_tokens}; expected at least 1.")
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; expected {' or '.join(DTYPES)}.")
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    # Earlier calls of the tokenizer have set these two.
    settings = {key: value for key, value in settings.items() if key not in ("truncation", "padding")}
    return {
        "version": _VERSION,
        "tokenizer": hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest(),
        "embedding_model": embedder.fingerprint,
        "width": embedder.width,
        "max_tokens": embedder.max_tokens,
        "window_tokens": window_tokens,
        "dtype": dtype,
        **_corpus_request(corpus),
    }


def _corpus_request(corpus: Corpus) -> dict[str, Any]:
    path = Path(corpus.path).expanduser()
    files = hashlib.sha256()
    for file in find_files(corpus.path):
        status = file.stat()
        files.update(json.dumps([str(file.relative_to(path)), status.st_size, status.st_mtime_ns]).encode())
    return {
        "corpus": str(path.resolve()),
        "files": files.hexdigest(),
        "column": corpus.column,
        "label_column": corpus.label_column,
        "encoding": corpus.encoding,
    }


@contextlib.contextmanager
def only_run(folder: Path) -> Iterator[None]:
    """Lock a folder for writing, and create it, while the context lasts. A folder that another run is writing to is an error."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(
            f"folder {str(folder)!r} is being written by another run; wait for that run, or choose another folder."
        ) from error
    try:
        yield
    finally:
        lock.release()


def write_array(path: Path, array: np.ndarray) -> None:
    """Write a `.npy` file, which appears whole or not at all."""
    with whole_file(path) as partial, partial.open("wb") as file:
        np.save(file, array)


def map_array(path: Path, rows: int, remedy: str = "Delete its folder, and build again.") -> np.ndarray:
    """Open a `.npy` file that has `rows` rows, one per window, memory-mapped. `remedy` ends the message for any other file."""
    try:
        array = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"file {str(path)!r} is absent or not whole: {first_line(error)}. {remedy}") from error
    if len(array) != rows:
        raise ValueError(
            f"file {str(path)!r} has {len(array):,} rows; expected {rows:,}, one for each window. {remedy}"
        )
    return array


def _read_record(folder: Path) -> dict[str, Any] | None:
    """Return the record of a folder of windows, or None if the folder has none. A damaged record is an error."""
    path = folder / _RECORD
    if not path.is_file():
        return None
    try:
        record = parse_json(path.read_text(encoding="utf-8"))
        return {"request": dict(record["request"]), **{key: record[key] for key in ("windows", "label_names")}}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"file {str(path)!r} was altered or is not whole. Delete its folder, and build again."
        ) from error


def _write_record(folder: Path, record: dict[str, Any]) -> None:
    with whole_file(folder / _RECORD) as partial:
        partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

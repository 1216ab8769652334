"""The windows of a corpus: cut by tokens, and embedded once into one mapped array in a folder."""

import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from midus_hf.config.errors import RequestError, as_request_error
from midus_hf.files.checkpoint_files import read_json
from midus_hf.files.outputs import atomic_write, convert_disk_errors, exclusive, write_text
from midus_hf.sources.characters import texts_digest
from midus_hf.sources.tokenizers import load_tokenizer
from midus_hf.topics.memory_retriever import TextEmbedder
from midus_hf.topics.tree import ClusterTree, lasting_name

if TYPE_CHECKING:
    from datasets import Dataset

# Number of windows that are embedded and then written to disk at once.
_STRETCH = 1024
_DOCUMENTS_A_BATCH = 64
_VERSION = 5
_RECORD, _EMBEDDINGS, _DOCUMENTS = "windows.json", "embeddings.npy", "documents.npy"


class Window(NamedTuple):
    """Consecutive tokens of a document, as text, with the indices of document and window."""

    document: int
    number: int
    text: str


def cut_windows(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, window_tokens: int) -> Iterator[Window]:
    """Cut texts into consecutive windows of `window_tokens` tokens; the last may be shorter."""
    remaining = enumerate(documents)
    while batch := list(itertools.islice(remaining, _DOCUMENTS_A_BATCH)):
        encoded = tokenizer(
            [text for _, text in batch],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        for (document, whole), offsets in zip(batch, encoded["offset_mapping"], strict=True):
            # Tokens may share a character. A window ends where the next one begins, so that no character is lost.
            begins = [0, *(begin for begin, _ in offsets[window_tokens::window_tokens])]
            for number, (begin, end) in enumerate(zip(begins, [*begins[1:], None], strict=True)):
                if (text := whole[begin:end]).strip():
                    yield Window(document, number, text)


def load_fast_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or the hub that can map its tokens to characters of the text."""
    with as_request_error(f"tokenizer is {name!r}, which cannot be loaded", OSError, ValueError, KeyError):
        tokenizer = load_tokenizer(name)
    if not tokenizer.is_fast:
        raise RequestError(
            f"tokenizer is {name!r}, which does not know the positions of its tokens in a text; expected a fast one, with a "
            "tokenizer.json."
        )
    return tokenizer


def load_window_tokenizer(tree: ClusterTree, name: str | Path) -> tuple[PreTrainedTokenizerBase, int]:
    """Return the tokenizer that cut a tree's windows, and a window's number of tokens."""
    if tree.origin.tokenizer is None:
        raise RequestError(
            f"tree {str(name)!r} does not say how windows are cut; expected a tree that 'midus cluster build' made."
        )
    return load_fast_tokenizer(tree.origin.tokenizer), tree.origin.window_tokens or 2048


class StoredWindows(NamedTuple):
    """A corpus's windows in a folder, memory-mapped: a row of `embeddings` and `documents` each."""

    embeddings: np.ndarray  # [N, c], float32
    documents: np.ndarray  # [N], int64
    corpus: str
    column: str


def store_windows(
    folder: Path,
    rows: "Dataset",
    corpus: str,
    column: str,
    tokenizer: PreTrainedTokenizerBase,
    embedder: TextEmbedder,
    window_tokens: int = 2048,
) -> StoredWindows:
    """Embed the windows of a corpus into a folder, except those already there, and return them."""
    from midus_hf.sources.progress import show_progress

    request = _request(rows, corpus, column, tokenizer, embedder, window_tokens)
    with only_run(folder):
        record = _read_record(folder) or {"request": request, "windows": None, "embedded": 0}
        for key, value in request.items():
            if key != "corpus" and record["request"].get(key) != value:  # files may be moved
                raise RequestError(
                    f"folder {str(folder)!r} holds windows that were made with another {key}, {record['request'].get(key)!r}; "
                    f"expected {value!r}. Choose another output, or delete this folder."
                )
        if record["windows"] is None:
            cut = cut_windows(rows[column], tokenizer, window_tokens)
            documents = np.array([window.document for window in cut], np.int64)
            write_array(folder / _DOCUMENTS, documents)
            shape = (len(documents), embedder.width)
            with convert_disk_errors(folder / _EMBEDDINGS, 4 * math.prod(shape)):
                np.lib.format.open_memmap(folder / _EMBEDDINGS, "w+", np.float32, shape).flush()
                if hasattr(os, "posix_fallocate"):  # a full disk would kill the process where it is mapped
                    with (folder / _EMBEDDINGS).open("r+b") as file:
                        os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
            record["windows"] = len(documents)
            _write_record(folder, record)
        if record["embedded"] < record["windows"]:
            embeddings = np.load(folder / _EMBEDDINGS, mmap_mode="r+")
            windows = cut_windows(rows[column], tokenizer, window_tokens)
            remaining = itertools.islice(windows, record["embedded"], None)
            progress: Any = {"unit": " windows", "total": len(embeddings), "initial": record["embedded"]}
            with show_progress(desc="embedding", **progress) as bar:
                while stretch := [window.text for window in itertools.islice(remaining, _STRETCH)]:
                    begin = record["embedded"]
                    record["embedded"] += len(stretch)
                    embeddings[begin : record["embedded"]] = embedder.embed(stretch, bar.update).numpy()
                    embeddings.flush()
                    _write_record(folder, record)
    return open_windows(folder)


def open_windows(folder: Path) -> StoredWindows:
    """Open the windows that `store_windows` wrote. Windows of a part of a corpus are an error."""
    record = _whole_record(folder)
    if record is None:
        raise RequestError(
            f"folder {str(folder)!r} holds no windows, or not all of a corpus; expected the windows of a tree. Run midus cluster "
            "build."
        )
    return StoredWindows(
        np.load(folder / _EMBEDDINGS, mmap_mode="r"),
        np.load(folder / _DOCUMENTS, mmap_mode="r"),
        record["request"]["corpus"],
        record["request"]["column"],
    )


def windows_of_corpus(folder: Path, rows: "Dataset", column: str) -> StoredWindows | None:
    """Return the stored windows if they were cut from the texts of a corpus, else None."""
    record = _whole_record(folder)
    is_same = record is not None and record["request"].get("texts") == texts_digest(rows[column])
    return open_windows(folder) if is_same else None


def _request(
    rows: "Dataset", corpus: str, column: str, tokenizer: Any, embedder: TextEmbedder, window_tokens: int
) -> dict[str, Any]:
    """Return what decides a corpus' windows and embeddings, to compare with an interrupted build's."""
    if window_tokens < 1:
        raise RequestError(f"window_tokens is {window_tokens}; expected at least 1.")
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    del settings["truncation"], settings["padding"]  # which earlier calls of the tokenizer have set
    return {
        "version": _VERSION,
        "tokenizer": hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest(),
        "embedding_model": embedder.fingerprint,
        "width": embedder.width,
        "max_tokens": embedder.max_tokens,
        "window_tokens": window_tokens,
        "corpus": lasting_name(corpus),
        "column": column,
        "texts": texts_digest(rows[column]),
    }


def only_run(folder: Path) -> AbstractContextManager[None]:
    """Return a context that creates and locks a folder; another run's folder is an error."""
    busy = f"folder {str(folder)!r} is being written by another run; wait for that run, or choose another folder."
    return exclusive(folder, RequestError(busy))


def write_array(path: Path, array: np.ndarray) -> None:
    with atomic_write(path) as partial, partial.open("wb") as file:
        np.save(file, array)


def _read_record(folder: Path) -> dict[str, Any] | None:
    path = folder / _RECORD
    return read_json(path) if path.is_file() else None


def _whole_record(folder: Path) -> dict[str, Any] | None:
    record = _read_record(folder)
    return record if record is not None and record["embedded"] == record["windows"] else None


def _write_record(folder: Path, record: dict[str, Any]) -> None:
    write_text(folder / _RECORD, json.dumps(record, indent=2) + "\n")

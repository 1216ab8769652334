"""The windows of a corpus on disk: embeddings, documents and labels, written once, and resumed after an interruption."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from midus_hf.clusters.corpus import Corpus, read_corpus
from midus_hf.clusters.growing_array import map_array
from midus_hf.clusters.window_shards import Embeddings, JoinedRows
from midus_hf.clusters.window_writer import WindowWriter, only_run, read_record, windows_request
from midus_hf.documents import find_files
from midus_hf.retrieval.embedding import TextEmbedder


@dataclass(frozen=True)
class StoredWindows:
    """The windows of a corpus in a folder, memory-mapped.

    Args:
        embeddings: Embeddings `[N, c]`, float16 or float32, one row per window, in the order of the corpus. Files of
            pipeline tasks are opened only when rows are read.
        documents: Number of the document of each window, `[N]`, int64.
        labels: Label of each window as an index into `label_names`, `[N]`, int32; None if the corpus has no labels.
        label_names: The labels, in the order of their first appearance.
        corpus: Location of the documents; None if pipeline tasks have embedded them.
        fingerprint: Fingerprint of the request and of the number of windows.
    """

    embeddings: Embeddings
    documents: np.ndarray
    labels: np.ndarray | None
    label_names: list[str]
    corpus: Corpus | None
    fingerprint: str


def store_windows(
    folder: Path,
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    embedder: TextEmbedder,
    window_tokens: int = 2048,
    dtype: str = "float32",
) -> StoredWindows:
    """Embed the windows of a corpus into a folder. Windows that the folder has already are not embedded again.

    Args:
        folder: Folder of windows, which is created.
        tokenizer: Tokenizer that cuts windows, from `load_fast_tokenizer`.
        window_tokens: Tokens per window. Default: 2048.
        dtype: Dtype in which embeddings are stored, `"float16"` or `"float32"`. Default: `"float32"`.

    Raises:
        ValueError: If the folder holds windows of another request or another run is writing to it, an option is out of
            range, or the corpus cannot be read or is empty.
    """
    from tqdm import tqdm

    request = {**windows_request(tokenizer, embedder, window_tokens, dtype), **_corpus_request(corpus)}
    with only_run(folder):
        writer = WindowWriter(folder, request)
        record = writer.record
        if not record.complete:
            with tqdm(desc="embedding", unit=" windows", initial=record.windows, disable=None) as bar:
                for _ in writer.write(read_corpus(corpus), tokenizer, embedder, bar.update):
                    pass
            if not record.windows:
                raise ValueError(f"corpus {corpus.path!r} has no document with a visible character. Add text to it.")
            writer.finish()
    return open_windows(folder)


def open_windows(folder: Path) -> StoredWindows:
    """Open the windows that `store_windows` or `join_shards` wrote.

    Raises:
        ValueError: If there are no windows, or not all of them.
    """
    record = read_record(folder)
    if record is None or not record.complete:
        raise ValueError(
            f"folder {str(folder)!r} holds no windows, or not all of a corpus; expected the windows of a tree. Run midus cluster "
            "build."
        )
    request = record.request
    embeddings: Embeddings
    if (shards := request.get("embeddings")) is None:
        corpus: Corpus | None = Corpus(*(request[key] for key in ("corpus", "column", "label_column", "encoding")))
        embeddings = map_array(folder / "embeddings.npy", record.windows)
    else:
        corpus, embeddings = None, JoinedRows(Path(shards))
    return StoredWindows(
        embeddings=embeddings,
        documents=map_array(folder / "documents.npy", record.windows),
        labels=None if request["label_column"] is None else map_array(folder / "labels.npy", record.windows),
        label_names=record.label_names,
        corpus=corpus,
        fingerprint=record.fingerprint,
    )


def windows_of_corpus(folder: Path, corpus: Corpus) -> StoredWindows | None:
    """Return the stored windows if they belong to a corpus whose files have not changed since, else None.

    Args:
        folder: Folder that may hold windows.
        corpus: The corpus to compare with. Its label column is ignored.
    """
    record = read_record(folder)
    if record is None or not record.complete or "files" not in record.request:
        return None
    wanted = {**_corpus_request(corpus), "label_column": record.request["label_column"]}
    return open_windows(folder) if all(record.request[key] == value for key, value in wanted.items()) else None


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

"""Embedding windows into a folder in stretches, so that an interrupted run can be resumed.

A stretch reaches the disk before the next stretch begins. A resumed run therefore uses the same stretches, and its
files have the same bytes as without the interruption. A stretch never crosses files of rows, so the embeddings of a
file do not depend on the files that are read along with it.
"""

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from transformers import PreTrainedTokenizerBase

from midus_hf.files.json_text import parse_json
from midus_hf.files.whole_files import whole_file
from midus_hf.topics.corpus import Document, Window, cut_windows
from midus_hf.topics.embedding import TextEmbedder
from midus_hf.topics.text_files import first_line

DTYPES = ("float16", "float32")
# Most windows per stretch, after which the progress is recorded.
_STRETCH = 1024

_VERSION = 2
_RECORD = "windows.json"
# Keys of a request that name locations. They may change, since files may be moved.
_PLACES = ("corpus", "embeddings", "embedding_model_name", "tokenizer_name")


@dataclass
class WindowRecord:
    """Progress of a folder of windows, up to its last complete stretch.

    Args:
        request: Everything that embeddings depend on, except the rounding of batches.
        windows: Number of stored windows. Default: 0.
        last_document: Number of the last window's document. Default: -1.
        last_number: Index of the last window among the windows of its document. Default: -1.
        texts: Digest of the texts of all documents up to `last_document`. Default: empty, for no documents.
        label_names: Labels, in the order of their first appearance. Default: none.
        sources: Pairs of a file of rows and its first window, if the writer keeps sources. Default: none.
        complete: Whether all windows are stored. Default: false.
    """

    request: dict[str, Any]
    windows: int = 0
    last_document: int = -1
    last_number: int = -1
    texts: str = ""
    label_names: list[str] = field(default_factory=list)
    sources: list[list[Any]] = field(default_factory=list)
    complete: bool = False

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the request (without locations) and the number of windows, 64 hexadecimal digits."""
        kept = {key: value for key, value in self.request.items() if key not in _PLACES}
        return hashlib.sha256(json.dumps([kept, self.windows], sort_keys=True).encode()).hexdigest()


def windows_request(
    tokenizer: PreTrainedTokenizerBase, embedder: TextEmbedder, window_tokens: int, dtype: str
) -> dict[str, Any]:
    """Return the settings that embeddings depend on, beside the documents, after checking them."""
    if window_tokens < 1:
        raise ValueError(f"window_tokens is {window_tokens}; expected at least 1.")
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; expected {' or '.join(DTYPES)}.")
    return {
        "version": _VERSION,
        "tokenizer": _fingerprint(tokenizer),
        "embedding_model": embedder.fingerprint,
        "width": embedder.width,
        "max_tokens": embedder.max_tokens,
        "window_tokens": window_tokens,
        "dtype": dtype,
    }


def check_request(folder: Path, existing: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise an error if a folder's windows were made for a request that differs from the wanted one in more than locations."""
    for key, value in wanted.items():
        if key not in _PLACES and existing.get(key) != value:
            raise ValueError(
                f"folder {str(folder)!r} holds windows that were made with another {key}, {existing.get(key)!r}; expected {value!r}. "
                "Choose another output, or delete this folder."
            )


class GrowingArray:
    """Array on disk to which rows are appended. `numpy.load` can read or memory-map the file.

    Args:
        width: Width c of rows `[c]`. Default: None; rows are single numbers.
        rows: Number of existing rows to keep; 0 creates the file anew. A file with fewer rows is an error. Default: 0.
    """

    def __init__(self, path: Path, dtype: str, width: int | None = None, rows: int = 0):
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._inner = () if width is None else (width,)
        self._file = path.open("r+b" if rows else "w+b")
        self.rows = rows
        self._write_header()
        self._begin = self._file.tell()
        whole_bytes = self._begin + rows * self._dtype.itemsize * (width or 1)
        if self._file.seek(0, os.SEEK_END) < whole_bytes:
            self._file.close()
            raise ValueError(
                f"file {str(path)!r} has lost rows; expected {rows:,}. Delete its folder, and build again."
            )
        self._file.truncate(whole_bytes)
        self._file.seek(whole_bytes)

    def append(self, rows: np.ndarray) -> None:
        """Append rows `[n, c]`, or `[n]` if rows are single numbers, in the dtype of the file."""
        assert rows.shape[1:] == self._inner
        self._file.write(np.ascontiguousarray(rows, self._dtype).tobytes())
        self.rows += len(rows)

    def flush(self) -> None:
        """Write the row count and flush all rows to the disk. The file is valid until more rows are appended."""
        end = self._file.tell()
        self._write_header()
        assert self._file.tell() == self._begin, "numpy leaves room for a growing first axis"
        self._file.seek(end)
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write_header(self) -> None:
        self._file.seek(0)
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.rows, *self._inner)}
        np.lib.format.write_array_header_1_0(self._file, header)


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


class WindowWriter:
    """Writer that embeds the windows of documents into a folder, and resumes after an interruption.

    Args:
        request: Everything that embeddings depend on: the result of `windows_request`, and what identifies the
            documents.
        keep_sources: Whether to record which file of rows each window comes from. Default: false.

    Raises:
        ValueError: If the folder holds windows of another request.
    """

    def __init__(self, folder: Path, request: dict[str, Any], keep_sources: bool = False):
        self._folder, self._keep_sources = folder, keep_sources
        self.record = read_record(folder) or WindowRecord(request)
        check_request(folder, self.record.request, request)
        self._digests: dict[int, str] = {}

    def write(
        self,
        documents: Iterable[Document],
        tokenizer: PreTrainedTokenizerBase,
        embedder: TextEmbedder,
        progress: Callable[[int], None] | None = None,
    ) -> Iterator[WindowRecord]:
        """Embed the windows that are not stored yet, and yield the record after each stretch that has reached the disk.

        Args:
            documents: All documents, starting with the first. Documents other than the interrupted run began with are
                an error.
            progress: Called with the number of windows that were just embedded. Default: None.
        """
        record = self.record
        names = {name: index for index, name in enumerate(record.label_names)}
        with contextlib.ExitStack() as stack:

            def array(name: str, dtype: str, width: int | None = None) -> GrowingArray:
                path = self._folder / f"{name}.npy"
                return stack.enter_context(contextlib.closing(GrowingArray(path, dtype, width, record.windows)))

            embeddings = array("embeddings", record.request["dtype"], embedder.width)
            numbers = array("documents", "int64")
            labels = array("labels", "int32") if record.request["label_column"] is not None else None
            for stretch in _stretches(self._remaining(documents, tokenizer)):
                source = stretch[0].document.source
                if self._keep_sources and (not record.sources or record.sources[-1][0] != source):
                    record.sources.append([source, record.windows])
                embeddings.append(embedder.embed([window.text for window in stretch], progress).numpy())
                numbers.append(np.array([window.document.number for window in stretch]))
                if labels is not None:
                    stretch_labels = [str(window.document.label) for window in stretch]
                    labels.append(np.array([names.setdefault(label, len(names)) for label in stretch_labels]))
                for written in (embeddings, numbers, labels):
                    if written is not None:
                        written.flush()
                record.windows = embeddings.rows
                record.last_document, record.last_number = stretch[-1].document.number, stretch[-1].number
                record.texts = self._digests[record.last_document]
                self._digests = {key: kept for key, kept in self._digests.items() if key >= record.last_document}
                record.label_names = list(names)
                write_record(self._folder, record)
                yield record

    def finish(self) -> None:
        """Record that all windows are stored."""
        self.record.complete = True
        write_record(self._folder, self.record)

    def _remaining(self, documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase) -> Iterator[Window]:
        done = (self.record.last_document, self.record.last_number)
        windows = cut_windows(self._from_there(documents), tokenizer, int(self.record.request["window_tokens"]))
        return (window for window in windows if (window.document.number, window.number) > done)

    def _from_there(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yield the documents from the last stored one on, after checking that the documents before are unchanged."""
        last, digest, number = self.record.last_document, "", -1
        for document in documents:
            number = document.number
            digest = hashlib.sha256(digest.encode() + document.text.encode("utf-8", "surrogatepass")).hexdigest()
            if number == last and digest != self.record.texts:
                break
            if number >= last:
                self._digests[number] = digest
                yield document
        else:
            if number >= last:
                return
        raise ValueError(
            f"folder {str(self._folder)!r} holds windows of other documents than the first {last + 1:,} that were read now; "
            "expected the same documents in the same order. Choose another output, or delete this folder."
        )


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


def read_record(folder: Path) -> WindowRecord | None:
    """Return the record of a folder of windows, or None if the folder has no record. A damaged record is an error."""
    path = folder / _RECORD
    if not path.is_file():
        return None
    try:
        return WindowRecord(**parse_json(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"file {str(path)!r} was altered or is not whole. Delete its folder, and build again."
        ) from error


def write_record(folder: Path, record: WindowRecord) -> None:
    """Replace the record of a folder of windows. A reader sees either the old or the new record."""
    with whole_file(folder / _RECORD) as partial:
        partial.write_text(json.dumps(vars(record), indent=2) + "\n", encoding="utf-8")


def _stretches(windows: Iterable[Window]) -> Iterator[list[Window]]:
    for _, windows_of_source in itertools.groupby(windows, key=lambda window: window.document.source):
        while stretch := list(itertools.islice(windows_of_source, _STRETCH)):
            yield stretch


def _fingerprint(tokenizer: Any) -> str:
    """Return a digest of all settings that decide where tokens begin, without the truncation and padding of earlier calls."""
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    kept = {key: value for key, value in settings.items() if key not in ("truncation", "padding")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()

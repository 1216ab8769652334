"""Windows are embedded into a folder a stretch at a time, and a stretch that is done is on the disk before the next begins.

So what an interrupted run has left goes on with the same stretches, and ends in the same bytes. A stretch ends with the file of
rows that its documents are from: the embeddings of a file do not depend on the files that are read along with it.
"""

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from transformers import PreTrainedTokenizerBase

from midus_hf.clusters.corpus import Document, Window, cut_windows
from midus_hf.clusters.growing_array import GrowingArray
from midus_hf.files.json_text import parse_json
from midus_hf.files.whole_files import whole_file
from midus_hf.retrieval.embedding import TextEmbedder

DTYPES = ("float16", "float32")
_STRETCH = 1024
"""Windows that are embedded between two records of how far it is, at most."""

_VERSION = 2
_RECORD = "windows.json"
_PLACES = ("corpus", "embeddings", "embedding_model_name", "tokenizer_name")
"""What a request says of where things lie: they may have moved."""


@dataclass
class WindowRecord:
    """How far it is: what is behind the last stretch that is whole.

    Args:
        request: All that embeddings depend on, but for the rounding of batches.
        windows: Windows that are there. Default: 0.
        last_document: The number of the document of the last of them. Default: -1.
        last_number: Its number among the windows of its document. Default: -1.
        texts: A digest of the texts of all documents up to that one. Default: of none.
        label_names: Labels, in the order in which they first appear. Default: none.
        sources: Pairs of a file of rows and the window with which it begins, where that was asked for. Default: none.
        complete: Whether all windows are there. Default: false.
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
        """SHA-256 over the request and how many windows there are, 64 hexadecimal digits; places are no part of it."""
        kept = {key: value for key, value in self.request.items() if key not in _PLACES}
        return hashlib.sha256(json.dumps([kept, self.windows], sort_keys=True).encode()).hexdigest()


def windows_request(
    tokenizer: PreTrainedTokenizerBase, embedder: TextEmbedder, window_tokens: int, dtype: str
) -> dict[str, Any]:
    """What embeddings depend on beside their documents.

    Args:
        tokenizer: Cuts windows.
        embedder: Embeds them.
        window_tokens: Tokens of a window.
        dtype: What embeddings are kept as.

    Raises:
        ValueError: If an option is out of range.
    """
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


def check_request(folder: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuse a folder that was made for another request.

    Args:
        folder: For the message.
        found: Its request.
        wanted: The one that it must have.

    Raises:
        ValueError: If they differ in anything but places.
    """
    for key, value in wanted.items():
        if key not in _PLACES and found.get(key) != value:
            raise ValueError(
                f"folder {str(folder)!r} holds windows that were made with another {key}, {found.get(key)!r}; expected {value!r}. "
                "Choose another output, or delete this folder."
            )


class WindowWriter:
    """Embeds the windows of documents into a folder, or as many of them as are not there yet.

    Args:
        folder: Where to.
        request: All that they depend on, from `windows_request` and more.
        keep_sources: Whether the record lists files of rows. Default: false.

    Raises:
        ValueError: If the folder holds the windows of another request.
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
        """Embed what remains, stretch by stretch.

        Args:
                documents: All of them, from the first on.
            tokenizer: As in `windows_request`.
            embedder: As in `windows_request`.
            progress: As in `TextEmbedder.embed`. Default: None.

        Yields:
            The record, after each stretch that is on the disk.

        Raises:
            ValueError: If documents are not those that an interrupted run has begun with.
        """
        record = self.record
        names = {name: place for place, name in enumerate(record.label_names)}
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
                    of_stretch = [str(window.document.label) for window in stretch]
                    labels.append(np.array([names.setdefault(label, len(names)) for label in of_stretch]))
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
        """Record that all windows are there."""
        self.record.complete = True
        write_record(self._folder, self.record)

    def _remaining(self, documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase) -> Iterator[Window]:
        done = (self.record.last_document, self.record.last_number)
        windows = cut_windows(self._from_there(documents), tokenizer, int(self.record.request["window_tokens"]))
        return (window for window in windows if (window.document.number, window.number) > done)

    def _from_there(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Documents from the last one on that is there, behind those with which an interrupted run began."""
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
            "expected the same ones in the same order. Choose another output, or delete this folder."
        )


@contextlib.contextmanager
def only_run(folder: Path) -> Iterator[None]:
    """Keep other runs from writing to a folder, which is made.

    Args:
        folder: Of windows.

    Raises:
        ValueError: If another run writes to it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(
            f"folder {str(folder)!r} is being written by another run; wait for it, or choose another."
        ) from error
    try:
        yield
    finally:
        lock.release()


def read_record(folder: Path) -> WindowRecord | None:
    """How far a folder is; None if it has no record.

    Args:
        folder: Of windows.

    Raises:
        ValueError: If the record was altered.
    """
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
    """Say how far a folder is; a reader finds this or what was said before.

    Args:
        folder: Of windows.
        record: What is said.
    """
    with whole_file(folder / _RECORD) as partial:
        partial.write_text(json.dumps(vars(record), indent=2) + "\n", encoding="utf-8")


def _stretches(windows: Iterable[Window]) -> Iterator[list[Window]]:
    for _, of_source in itertools.groupby(windows, key=lambda window: window.document.source):
        while stretch := list(itertools.islice(of_source, _STRETCH)):
            yield stretch


def _fingerprint(tokenizer: Any) -> str:
    """Of all that decides where tokens begin; what an earlier call has left of truncation and padding is no part of it."""
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    kept = {key: value for key, value in settings.items() if key not in ("truncation", "padding")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()

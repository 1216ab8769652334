"""The windows of a corpus on disk: embeddings, documents and labels, written once, and resumed after an interruption.

One run writes the windows of a corpus into one folder. Several tasks of a pipeline write them into a folder each, which
are read as one array. If tasks record which files of rows their documents come from, the order of windows is the order
of these files, as if one run had read them all, and does not depend on the number of tasks. Otherwise it is the order of
the tasks.
"""

import functools
import hashlib
import itertools
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from midus_hf.topics.corpus import Corpus, read_corpus
from midus_hf.topics.embedding import TextEmbedder
from midus_hf.topics.text_files import find_files
from midus_hf.topics.window_writer import (
    GrowingArray,
    WindowRecord,
    WindowWriter,
    check_request,
    map_array,
    only_run,
    read_record,
    windows_request,
    write_record,
)

_REMEDY = "Run the pipeline again, which embeds what is absent."


def task_folder(folder: Path, rank: int) -> Path:
    """Return the folder, in the folder of all tasks, that a task writes to."""
    return folder / f"{rank:05d}"


class _Run(NamedTuple):
    """Windows of one task that are consecutive both in the task and in the joined order, by which runs are sorted."""

    source: tuple[str, ...]
    rank: int
    begin: int
    end: int


class JoinedRows:
    """The embeddings of all tasks, `[N, c]`. Files are opened when rows are read; a task that is not complete is an error then."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._mapped = functools.cache(self._map)

    @property
    def shape(self) -> tuple[int, int]:
        """Number of windows N and width c."""
        return len(self), int(self.records[0].request["width"])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, rows: np.ndarray | slice) -> np.ndarray:
        wanted = np.arange(*rows.indices(len(self))) if isinstance(rows, slice) else np.asarray(rows)
        runs = np.searchsorted(self._ends, wanted, side="right")
        ranks, rows_in_task = self._ranks[runs], wanted + self._shifts[runs]
        rows_read = np.empty((len(wanted), self.shape[1]), self.records[0].request["dtype"])
        order = np.argsort(ranks, kind="stable")
        present, begins = np.unique(ranks[order], return_index=True)
        for rank, positions in zip(present.tolist(), np.split(order, begins[1:]), strict=False):
            rows_read[positions] = self._mapped(rank)[rows_in_task[positions]]
        return rows_read

    @cached_property
    def records(self) -> list[WindowRecord]:
        """The record of each task."""
        first = self._complete_record(0, 1)
        tasks = int(first.request["tasks"])
        records = [first, *(self._complete_record(rank, tasks) for rank in range(1, tasks))]
        for rank, record in enumerate(records):
            check_request(task_folder(self._folder, rank), record.request, {**first.request, "rank": rank})
        return records

    @cached_property
    def runs(self) -> list[_Run]:
        """All windows as runs of consecutive windows, in the joined order."""
        runs = []
        for rank, record in enumerate(self.records):
            begins = [*record.sources, [None, record.windows]]
            for (source, begin), (_, end) in itertools.pairwise(begins):
                runs.append(_Run(() if source is None else PurePosixPath(source).parts, rank, begin, end))
        return sorted(runs)

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.array(list(itertools.accumulate(run.end - run.begin for run in self.runs)), np.int64)

    @cached_property
    def _ranks(self) -> np.ndarray:
        """Number of the task of each run."""
        return np.array([run.rank for run in self.runs], np.int64)

    @cached_property
    def _shifts(self) -> np.ndarray:
        """Offset of each run: a row's index in its task minus its index in the joined order."""
        return np.array([run.end for run in self.runs], np.int64) - self._ends

    def _map(self, rank: int) -> np.ndarray:
        """Map the embeddings of a task, without keeping the file open: a process may have only about a thousand open files."""
        array = self.map(rank, "embeddings")
        assert isinstance(array, np.memmap)
        path = task_folder(self._folder, rank) / "embeddings.npy"
        content = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8).numpy()
        return np.ndarray(array.shape, array.dtype, content, array.offset)

    def map(self, rank: int, name: str) -> np.ndarray:
        """Map an array of a task: `"embeddings"`, `"documents"` or `"labels"`."""
        path = task_folder(self._folder, rank) / f"{name}.npy"
        array = map_array(path, self.records[rank].windows, "Delete its folder, and run the pipeline again.")
        width = self.records[rank].request["width"]
        if name == "embeddings" and array.shape[1:] != (width,):
            raise ValueError(
                f"file {str(path)!r} has rows of the shape {array.shape[1:]}; expected ({width},), the width of the embedding "
                "model. Delete its folder, and run the pipeline again."
            )
        return array

    def _complete_record(self, rank: int, tasks: int) -> WindowRecord:
        record = read_record(task_folder(self._folder, rank))
        if record is None and not rank:
            raise ValueError(
                f"embeddings is {str(self._folder)!r}, which has nothing of task 0; expected a folder that EmbedWindows wrote. "
                f"{_REMEDY}"
            )
        if record is None or not record.complete:
            raise ValueError(
                f"embeddings is {str(self._folder)!r}, where task {rank} is not complete; expected all tasks. {_REMEDY}"
            )
        if "tasks" not in record.request:
            raise ValueError(
                f"embeddings is {str(self._folder)!r}, whose folder {rank:05d} was not written by a task; expected a folder that "
                "EmbedWindows wrote. Name that folder."
            )
        return record


# Embeddings `[N, c]`, float16 or float32, on the disk or in memory.
Embeddings = np.ndarray | JoinedRows


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
    """Open the windows that `store_windows` or `join_shards` wrote. Windows of a part of a corpus are an error."""
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
    """Return the stored windows if they belong to a corpus whose files have not changed since, else None. Labels do not matter."""
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


def join_shards(folder: Path, output: Path) -> None:
    """Write the documents and labels of all tasks' windows in the joined order, renumbered; embeddings are not copied.

    Raises:
        ValueError: If `JoinedRows` cannot read the tasks, no task has any window, or `output` holds other windows.
    """
    joined = JoinedRows(folder)
    first = joined.records[0].request
    if not len(joined):
        raise ValueError(
            f"embeddings is {str(folder)!r}, whose {len(joined.records)} tasks have no document with a visible character. Add text "
            "to the corpus."
        )
    texts = hashlib.sha256("".join(record.texts for record in joined.records).encode()).hexdigest()
    request = {key: value for key, value in first.items() if key != "rank"}
    request |= {"texts": texts, "embeddings": str(folder.resolve())}
    existing = read_record(output)
    check_request(output, request if existing is None else existing.request, request)
    numbers = GrowingArray(output / "documents.npy", "int64")
    labels = None if first["label_column"] is None else GrowingArray(output / "labels.npy", "int32")
    names: dict[str, int] = {}
    documents = 0
    for _, rank, begin, end in joined.runs:
        run_documents = joined.map(rank, "documents")[begin:end]
        numbers.append(run_documents - run_documents[0] + documents)
        documents += int(run_documents[-1] - run_documents[0]) + 1
        if labels is not None:
            run_labels = joined.map(rank, "labels")[begin:end]
            task_label_names = joined.records[rank].label_names
            present, firsts = np.unique(run_labels, return_index=True)
            renumbered = np.zeros(len(task_label_names), np.int32)
            for label in present[np.argsort(firsts)].tolist():
                renumbered[label] = names.setdefault(task_label_names[label], len(names))
            labels.append(renumbered[run_labels])
    for written in (numbers, labels):
        if written is not None:
            written.flush()
            written.close()
    write_record(output, WindowRecord(request, len(joined), label_names=list(names), complete=True))

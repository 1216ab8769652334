"""Windows that several tasks have embedded into separate folders, read as one array.

If tasks record which files of rows their documents come from, the order of windows is the order of these files, as if
one run had read them all, and does not depend on the number of tasks. Otherwise it is the order of the tasks.
"""

import functools
import hashlib
import itertools
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

import numpy as np
import torch

from midus_hf.clusters.growing_array import GrowingArray, map_array
from midus_hf.clusters.window_writer import WindowRecord, check_request, read_record, write_record

_REMEDY = "Run the pipeline again, which embeds what is absent."


def task_folder(folder: Path, rank: int) -> Path:
    """Return the folder that a task writes to.

    Args:
        folder: Folder of all tasks.
    """
    return folder / f"{rank:05d}"


@dataclass(frozen=True)
class _Run:
    """Windows of one task that are consecutive both in the task and in the joined order."""

    source: str | None
    rank: int
    begin: int
    end: int

    @property
    def sort_key(self) -> tuple[tuple[str, ...], int, int]:
        return (() if self.source is None else PurePosixPath(self.source).parts), self.rank, self.begin


class JoinedRows:
    """The embeddings of all tasks, `[N, c]`. Files are opened when rows are read.

    Args:
        folder: Folder of all tasks.

    Raises:
        ValueError: On reading, if a task is not complete, or tasks were run with different settings.
    """

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
            runs += [_Run(source, rank, begin, end) for (source, begin), (_, end) in itertools.pairwise(begins)]
        return sorted(runs, key=lambda run: run.sort_key)

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
        path = _array_file(self._folder, rank, "embeddings")
        content = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8).numpy()
        return np.ndarray(array.shape, array.dtype, content, array.offset)

    def map(self, rank: int, name: str) -> np.ndarray:
        """Map an array of a task.

        Args:
            name: `"embeddings"`, `"documents"` or `"labels"`.

        Raises:
            ValueError: If the file is missing or incomplete, or has embeddings of another width.
        """
        path = _array_file(self._folder, rank, name)
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


def _array_file(folder: Path, rank: int, name: str) -> Path:
    return task_folder(folder, rank) / f"{name}.npy"


def join_shards(folder: Path, output: Path) -> None:
    """Write the documents and labels of all tasks' windows in the joined order, renumbered; embeddings are not copied.

    Args:
        folder: Folder of all tasks.
        output: Folder of windows, which `open_windows` reads.

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
    for run in joined.runs:
        run_documents = joined.map(run.rank, "documents")[run.begin : run.end]
        numbers.append(run_documents - run_documents[0] + documents)
        documents += int(run_documents[-1] - run_documents[0]) + 1
        if labels is not None:
            run_labels = joined.map(run.rank, "labels")[run.begin : run.end]
            task_label_names = joined.records[run.rank].label_names
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


# Embeddings `[N, c]`, float16 or float32, on the disk or in memory.
Embeddings = np.ndarray | JoinedRows

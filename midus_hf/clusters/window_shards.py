"""Windows that several tasks have embedded, each into a folder of its own: read as one array, in one order.

Where tasks say which files of rows their documents are from, that order is the order of these files, as if one run had read them all:
it does not depend on how many tasks there were. Elsewhere it is the order of the tasks.
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
    """Where a task writes.

    Args:
        folder: Of all tasks.
        rank: Of the task.
    """
    return folder / f"{rank:05d}"


@dataclass(frozen=True)
class _Run:
    """Windows of one task that follow one another there and in the order of all."""

    source: str | None
    rank: int
    begin: int
    end: int

    @property
    def place(self) -> tuple[tuple[str, ...], int, int]:
        return (() if self.source is None else PurePosixPath(self.source).parts), self.rank, self.begin


class JoinedRows:
    """The embeddings of all tasks, `[N, c]`; files are opened when rows are read.

    Args:
        folder: Of all tasks.

    Raises:
        ValueError: When read, if a task is not complete, or tasks have not done the same.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._mapped = functools.cache(self._map)

    @property
    def shape(self) -> tuple[int, int]:
        """N and c."""
        return len(self), int(self.records[0].request["width"])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, rows: np.ndarray | slice) -> np.ndarray:
        wanted = np.arange(*rows.indices(len(self))) if isinstance(rows, slice) else np.asarray(rows)
        runs = np.searchsorted(self._ends, wanted, side="right")
        ranks, places = self._ranks[runs], wanted + self._shifts[runs]
        found = np.empty((len(wanted), self.shape[1]), self.records[0].request["dtype"])
        order = np.argsort(ranks, kind="stable")
        present, begins = np.unique(ranks[order], return_index=True)
        for rank, here in zip(present.tolist(), np.split(order, begins[1:]), strict=False):
            found[here] = self._mapped(rank)[places[here]]
        return found

    @cached_property
    def records(self) -> list[WindowRecord]:
        """What each task has written."""
        first = self._complete_record(0, 1)
        tasks = int(first.request["tasks"])
        records = [first, *(self._complete_record(rank, tasks) for rank in range(1, tasks))]
        for rank, record in enumerate(records):
            check_request(task_folder(self._folder, rank), record.request, {**first.request, "rank": rank})
        return records

    @cached_property
    def runs(self) -> list[_Run]:
        """Where windows are, in their order."""
        found = []
        for rank, record in enumerate(self.records):
            begins = [*record.sources, [None, record.windows]]
            found += [_Run(source, rank, begin, end) for (source, begin), (_, end) in itertools.pairwise(begins)]
        return sorted(found, key=lambda run: run.place)

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.array(list(itertools.accumulate(run.end - run.begin for run in self.runs)), np.int64)

    @cached_property
    def _ranks(self) -> np.ndarray:
        """The task of each run."""
        return np.array([run.rank for run in self.runs], np.int64)

    @cached_property
    def _shifts(self) -> np.ndarray:
        """How far the rows of each run are from their places among all."""
        return np.array([run.end for run in self.runs], np.int64) - self._ends

    def _map(self, rank: int) -> np.ndarray:
        """Embeddings of a task; the file itself is not kept open, of which a process may have about a thousand."""
        found = self.map(rank, "embeddings")
        assert isinstance(found, np.memmap)
        path = _array_file(self._folder, rank, "embeddings")
        content = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8).numpy()
        return np.ndarray(found.shape, found.dtype, content, found.offset)

    def map(self, rank: int, name: str) -> np.ndarray:
        """An array of a task.

        Args:
            rank: Of the task.
            name: `"embeddings"`, `"documents"` or `"labels"`.

        Raises:
            ValueError: If it is absent or not whole.
        """
        path = _array_file(self._folder, rank, name)
        found = map_array(path, self.records[rank].windows, "Delete its folder, and run the pipeline again.")
        width = self.records[rank].request["width"]
        if name == "embeddings" and found.shape[1:] != (width,):
            raise ValueError(
                f"file {str(path)!r} has rows of the shape {found.shape[1:]}; expected ({width},), the width of the embedding "
                "model. Delete its folder, and run the pipeline again."
            )
        return found

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
                f"embeddings is {str(self._folder)!r}, whose {rank:05d} was written by no task; expected a folder that EmbedWindows "
                "wrote. Name it."
            )
        return record


def _array_file(folder: Path, rank: int, name: str) -> Path:
    return task_folder(folder, rank) / f"{name}.npy"


def join_shards(folder: Path, output: Path) -> None:
    """Write documents and labels of all tasks in their order, numbered through; embeddings stay where they are.

    Args:
        folder: Of all tasks.
        output: Folder of windows, which `open_windows` reads.

    Raises:
        ValueError: As `JoinedRows`; if no task has any window; or if `output` holds other windows.
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
    found = read_record(output)
    check_request(output, request if found is None else found.request, request)
    numbers = GrowingArray(output / "documents.npy", "int64")
    labels = None if first["label_column"] is None else GrowingArray(output / "labels.npy", "int32")
    names: dict[str, int] = {}
    documents = 0
    for run in joined.runs:
        here = joined.map(run.rank, "documents")[run.begin : run.end]
        numbers.append(here - here[0] + documents)
        documents += int(here[-1] - here[0]) + 1
        if labels is not None:
            of_run = joined.map(run.rank, "labels")[run.begin : run.end]
            of_task = joined.records[run.rank].label_names
            present, firsts = np.unique(of_run, return_index=True)
            renumbered = np.zeros(len(of_task), np.int32)
            for label in present[np.argsort(firsts)].tolist():
                renumbered[label] = names.setdefault(of_task[label], len(names))
            labels.append(renumbered[of_run])
    for written in (numbers, labels):
        if written is not None:
            written.flush()
            written.close()
    write_record(output, WindowRecord(request, len(joined), label_names=list(names), complete=True))


Embeddings = np.ndarray | JoinedRows
"""`[N, c]` float16 or float32, on the disk or in memory."""

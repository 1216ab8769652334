"""A record of which documents trained each fetched block, kept from the sequences of every step."""

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from midus_hf.banks.audit import BankAudit, Document, Trained
from midus_hf.banks.block_reader import GENERIC
from midus_hf.banks.trained_bank import TrainedBank
from midus_hf.config.fetched_blocks import BANK_AUDIT, BankLayout
from midus_hf.training.data.clustered_corpus import ClusteredDataset
from midus_hf.training.data.former_corpus import HubRows, LocalText
from midus_hf.training.data.mixture import Mixture

# Key under which an example has its number in the dataset, beside the inputs of the model.
SEQUENCE = "sequence"

# Number of a sequence, and the path whose blocks it fetched.
Seen = tuple[int, tuple[int, ...]]


class NumberedSequences(Dataset):
    """Sequences of a dataset, each with its number in the dataset under the key `SEQUENCE`.

    The number stays with the sequence when sequences are shuffled and dealt out to processes.
    """

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**self.dataset[index], SEQUENCE: torch.tensor(index)}


class CorpusDocuments:
    """Locations of the documents of corpora, kept in a temporary SQLite file without a name.

    Args:
        corpora: Pairs of a corpus and the column that names its documents; None for documents without names.

    Raises:
        DocumentError: If a corpus cannot be read.
    """

    def __init__(self, corpora: Iterable[tuple[LocalText | HubRows, str | None]]):
        self._database = sqlite3.connect("")
        self._database.execute(
            "create table places (corpus integer, number integer, file text, digest text, line integer, name text, "
            "primary key (corpus, number)) without rowid"
        )
        for number, (corpus, column) in enumerate(corpora):
            self._database.executemany(
                "insert into places values (?, ?, ?, ?, ?, ?)",
                ((number, *location) for location in _places(corpus, column)),
            )

    def __call__(self, corpus: int, number: int) -> Document:
        """Return the location and the name of a document, by the index of its corpus and its index there, from 0."""
        location = self._database.execute(
            "select file, digest, line, name from places where corpus = ? and number = ?", (corpus, number)
        ).fetchone()
        assert location is not None, "the corpus has the documents that its sequences are of"
        return Document(*location)


class SequenceAudit:
    """Record of what trains the blocks of a run, in the databases of their banks.

    Each process notes the sequences that it saw; the first process records the sequences of all processes.

    Args:
        dataset: Dataset that has the sequences, by their numbers.
        documents: Finds a document by its corpus and its index there. Default: None, in processes other than the first.
    """

    def __init__(self, dataset: ClusteredDataset | Mixture, documents: Callable[[int, int], Document] | None = None):
        self.dataset, self.documents = dataset, documents
        self._audits: list[tuple[BankLayout, BankAudit]] = []
        self._seen: list[Seen] = []

    def follow(self, banks: Sequence[TrainedBank]) -> None:
        """Record from now on what trains the banks; only the first process calls this.

        If a bank has no record, the blocks that were already written in it are noted as blocks whose earlier training
        is unknown.
        """
        assert self.documents is not None
        for bank in banks:
            audit, stored = BankAudit(), bank.bank
            if (stored.folder / BANK_AUDIT).exists():
                audit.load(stored.folder / BANK_AUDIT)
            else:
                audit.add_unrecorded((level, index) for level in bank.layout.levels for index in stored.written(level))
            bank.audit = audit
            self._audits.append((bank.layout, audit))

    def see(self, sequences: torch.Tensor, paths: torch.Tensor) -> None:
        """Note the numbers `[B]` of the sequences of a training pass, and the paths `[B, p]` whose blocks they fetch."""
        self._seen += zip(sequences.tolist(), map(tuple, paths.tolist()), strict=True)

    def step(self) -> None:
        """Record the sequences seen since the last step, once blocks are updated; all processes call this."""
        seen, self._seen = self._seen, []
        if dist.is_initialized() and dist.get_world_size() > 1:
            seen_by_process: list[list[Seen]] = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(seen_by_process, seen)
            seen = [each for seen_by_one in seen_by_process for each in seen_by_one]
        if not self._audits:
            return
        sequences: Counter[tuple[Document, tuple[int, ...]]] = Counter()
        tokens: Counter[tuple[Document, tuple[int, ...]]] = Counter()
        for (number, path), times in Counter(seen).items():
            for document, count in self._in_sequence(number):
                sequences[document, path] += times
                tokens[document, path] += times * count
        for layout, audit in self._audits:
            audit.add(
                Trained((level, _index(layout, level, path)), document, sequences[document, path], count)
                for (document, path), count in tokens.items()
                for level in layout.levels
            )

    def _in_sequence(self, number: int) -> Iterator[tuple[Document, int]]:
        """Return an iterator over the documents of a sequence, each with its number of tokens there."""
        assert self.documents is not None
        find, corpus, part = self.documents, 0, self.dataset
        if isinstance(part, Mixture):
            corpus, number = part.place(number)
            part = part.parts[corpus]
        return ((find(corpus, document), count) for document, count in part.documents(number))


def _index(layout: BankLayout, level: int, path: Sequence[int]) -> int:
    return layout.blocks.nodes(level) if path[level - 1] == GENERIC else path[level - 1]


def _places(corpus: LocalText | HubRows, column: str | None) -> Iterator[tuple[int, str, str, int, str | None]]:
    digests = corpus.digests()
    for number, (location, row) in enumerate(corpus.rows()):
        name = None if column is None or row.get(column) is None else str(row[column])
        yield number, corpus.name_of(location.file), digests[location.file], location.line, name

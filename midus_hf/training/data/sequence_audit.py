"""Which documents are in the sequences that a step trains on, recorded for each block that these fetch."""

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from midus_hf.banks.audit import BankAudit, Document, Trained
from midus_hf.banks.block_reader import GENERIC
from midus_hf.banks.trained_bank import TrainedBank
from midus_hf.config.fetched_blocks import BANK_AUDIT, BankLayout
from midus_hf.training.data.clustered_corpus import ClusteredDataset
from midus_hf.training.data.corpus import HubRows, LocalText
from midus_hf.training.data.mixture import Mixture

SEQUENCE = "sequence"
"""What an example carries beside what a model takes: its number in the dataset."""


Seen = tuple[int, tuple[int, ...]]
"""The number of a sequence, and the path whose blocks it fetched."""


class NumberedSequences(Dataset):
    """Sequences that say which they are, under `SEQUENCE`, whoever shuffles them or deals them out.

    Args:
        dataset: Whose sequences they are.
    """

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __len__(self) -> int:
        assert isinstance(self.dataset, Sized)
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**self.dataset[index], SEQUENCE: torch.tensor(index)}


class CorpusDocuments:
    """Where each document of corpora is, by its place among those that are read; kept in a temporary file that has no name.

    Args:
        corpora: Each with the column that names its documents, if one does.

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
                ((number, *place) for place in _places(corpus, column)),
            )

    def __call__(self, corpus: int, number: int) -> Document:
        """A document.

        Args:
            corpus: Which of them.
            number: Of the document within it, from 0.
        """
        place = self._database.execute(
            "select file, digest, line, name from places where corpus = ? and number = ?", (corpus, number)
        ).fetchone()
        assert place is not None, "the corpus has the documents that its sequences are of"
        return Document(*place)


class SequenceAudit:
    """Records what trains the blocks of a run, in the databases of their banks.

    Of several processes each says which sequences it has seen, and the first records those of all.

    Args:
        dataset: Whose sequences are seen, by their numbers.
        documents: Finds a document by its corpus and its place there. Default: none, in processes other than the first.
    """

    def __init__(self, dataset: ClusteredDataset | Mixture, documents: Callable[[int, int], Document] | None = None):
        self.dataset, self.documents = dataset, documents
        self._layouts: list[BankLayout] = []
        self._audits: list[BankAudit] = []
        self._seen: list[Seen] = []

    def follow(self, banks: Sequence[TrainedBank]) -> None:
        """Record from now on what trains banks; the first process alone calls it.

        Of blocks that were written before and of which their bank has no record it is noted that there is none.
        """
        assert self.documents is not None
        for bank in banks:
            audit, before = BankAudit(), bank.bank
            if (before.folder / BANK_AUDIT).exists():
                audit.load(before.folder / BANK_AUDIT)
            else:
                audit.add_unrecorded((level, index) for level in bank.layout.levels for index in before.written(level))
            bank.audit = audit
            self._layouts.append(bank.layout)
            self._audits.append(audit)

    def see(self, sequences: torch.Tensor, paths: torch.Tensor) -> None:
        """Note the numbers `[B]` of sequences of a pass with gradients, and the paths `[B, p]` whose blocks they fetch."""
        self._seen += zip(sequences.tolist(), map(tuple, paths.tolist()), strict=True)

    def step(self) -> None:
        """Record what was seen since the last step, which has updated blocks; all processes call it."""
        seen, self._seen = self._seen, []
        if dist.is_initialized() and dist.get_world_size() > 1:
            of_all: list[list[Seen]] = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(of_all, seen)
            seen = [each for of_process in of_all for each in of_process]
        if not self._audits:
            return
        sequences: Counter[tuple[Document, tuple[int, ...]]] = Counter()
        tokens: Counter[tuple[Document, tuple[int, ...]]] = Counter()
        for (number, path), times in Counter(seen).items():
            for document, count in self._in_sequence(number):
                sequences[document, path] += times
                tokens[document, path] += times * count
        for layout, audit in zip(self._layouts, self._audits, strict=True):
            audit.add(
                Trained((level, _index(layout, level, path)), document, sequences[document, path], count)
                for (document, path), count in tokens.items()
                for level in layout.levels
            )

    def _in_sequence(self, number: int) -> Iterator[tuple[Document, int]]:
        """Its documents, and its tokens of each."""
        assert self.documents is not None
        find = self.documents
        corpus, place = self.dataset.place(number) if isinstance(self.dataset, Mixture) else (0, number)
        part = self.dataset.parts[corpus] if isinstance(self.dataset, Mixture) else self.dataset
        return ((find(corpus, document), count) for document, count in part.documents(place))


def _index(layout: BankLayout, level: int, path: Sequence[int]) -> int:
    return layout.blocks.nodes(level) if path[level - 1] == GENERIC else path[level - 1]


def _places(corpus: LocalText | HubRows, column: str | None) -> Iterator[tuple[int, str, str, int, str | None]]:
    digests = corpus.digests()
    for number, (place, row) in enumerate(corpus.rows()):
        name = None if column is None or row.get(column) is None else str(row[column])
        yield number, corpus.name_of(place.file), digests[place.file], place.line, name

"""Which documents trained a block: the record of a bank, a database of SQLite beside it."""

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from midus_hf.banks.level_file import BankError
from midus_hf.files.whole_files import whole_file

Block = tuple[int, int]
"""The level of a block, counted from 1, and the index of its record."""

_VERSION = 1
_SCHEMA = """
create table files (id integer primary key, name text not null, digest text not null, unique (name, digest));
create table documents (
    id integer primary key, file integer not null references files, line integer not null, name text, unique (file, line)
);
create table trained (
    level integer, block integer, deleted integer, document integer references documents,
    sequences integer not null, tokens integer not null, primary key (level, block, deleted, document)
) without rowid;
create table unrecorded (level integer, block integer, primary key (level, block)) without rowid;
"""
_ADD = """
insert into trained (level, block, deleted, document, sequences, tokens) values (?, ?, ?, ?, ?, ?)
on conflict (level, block, deleted, document) do update
set sequences = sequences + excluded.sequences, tokens = tokens + excluded.tokens
"""


@dataclass(frozen=True)
class Document:
    """A document of a corpus.

    Args:
        file: Name of the file that has it, or of a dataset of the Hub.
        digest: Of what the file holds: the sum that `b2sum` gives, or the dataset's fingerprint.
        line: Its line, or row, counted from 1.
        name: What the corpus calls it; None if it has no name.
    """

    file: str
    digest: str
    line: int
    name: str | None = None


@dataclass(frozen=True)
class Trained:
    """That a document was in sequences that fetched a block while it trained.

    Args:
        block: Which.
        document: Which.
        sequences: How many they were; one that was seen in two epochs counts twice.
        tokens: Of the document in them all.
        deleted: Whether the block was deleted since.
    """

    block: Block
    document: Document
    sequences: int
    tokens: int
    deleted: bool = False


class BankAudit:
    """What has trained the blocks of a bank.

    Args:
        path: Of the database, which is changed where it lies. Default: none; what is recorded then waits in a temporary file
            that has no name, until `save`.

    Raises:
        BankError: If there is none, or it is none of these.
    """

    def __init__(self, path: Path | None = None):
        if path is not None and not path.is_file():
            raise BankError(f"there is no audit at {path}; expected one, of a run that was given audit: true.")
        self._database = sqlite3.connect("" if path is None else path)
        if path is None:
            self._database.executescript(f"{_SCHEMA} pragma user_version = {_VERSION};")
            return
        try:
            (version,) = self._database.execute("pragma user_version").fetchone()
        except sqlite3.DatabaseError:
            version = None
        if version != _VERSION:
            self.close()
            raise BankError(f"{path} is no audit of version {_VERSION}; expected one. Copy the bank again.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Keep what was changed, and close the database."""
        self._database.commit()
        self._database.close()

    def load(self, path: Path) -> None:
        """Forget everything, and go on from a record that `save` wrote.

        Raises:
            BankError: If there is none.
        """
        with BankAudit(path) as saved:
            self._database.commit()
            saved._database.backup(self._database)

    def save(self, path: Path) -> None:
        """Write the record as it is to a file, whole or not at all.

        Raises:
            OSError: If it cannot be written, as on a full disk.
        """
        self._database.commit()
        try:
            with whole_file(path) as partial, contextlib.closing(sqlite3.connect(partial)) as copy:
                self._database.backup(copy)
        except sqlite3.OperationalError as error:
            raise OSError(f"{path} cannot be written: {error}") from error

    def add(self, trained: Iterable[Trained]) -> None:
        """Record what trained blocks; what is known of the same block and document is added to."""
        trained = list(trained)
        ids = {document: self._id(document) for document in dict.fromkeys(each.document for each in trained)}
        self._database.executemany(
            _ADD, [(*each.block, each.deleted, ids[each.document], each.sequences, each.tokens) for each in trained]
        )

    def add_unrecorded(self, blocks: Iterable[Block]) -> None:
        """Remember of blocks that something trained them of which there is no record."""
        self._database.executemany("insert or ignore into unrecorded values (?, ?)", blocks)

    def delete(self, blocks: Sequence[Block]) -> None:
        """Mark what is known of blocks as being of blocks that were deleted."""
        for block in blocks:
            gone = [Trained(each.block, each.document, each.sequences, each.tokens, True) for each in self._of(block)]
            self._database.execute("delete from trained where level = ? and block = ? and not deleted", block)
            self.add(gone)
        self._database.executemany("delete from unrecorded where level = ? and block = ?", blocks)

    def take(self, block: Block, other: "BankAudit") -> None:
        """Know of a block what another record knows, and nothing else."""
        self._database.execute("delete from trained where level = ? and block = ?", block)
        self._database.execute("delete from unrecorded where level = ? and block = ?", block)
        self.add(other.trained([block]))
        self.add_unrecorded(other.unrecorded() & {block})

    def unrecorded(self) -> set[Block]:
        """Blocks that something trained of which there is no record."""
        return set(self._database.execute("select level, block from unrecorded"))

    def totals(self) -> Iterator[tuple[Block, bool, int, int, int]]:
        """Each block that was trained, ascending, whether it was deleted since, and its documents, sequences and tokens."""
        rows = self._database.execute(
            "select level, block, deleted, count(*), sum(sequences), sum(tokens) from trained group by level, block, deleted "
            "order by level, block, deleted"
        )
        return (((level, block), bool(deleted), *numbers) for level, block, deleted, *numbers in rows)

    def trained(self, blocks: Iterable[Block] | None = None) -> Iterator[Trained]:
        """What is known of blocks, by document, in the order of files and lines within each block.

        Args:
            blocks: Which. Default: all, and by document first.
        """
        if blocks is None:
            return self._rows("order by files.name, digest, line, deleted, level, block")
        return (
            each
            for block in blocks
            for each in self._rows("where level = ? and block = ? order by deleted, files.name, digest, line", block)
        )

    def _of(self, block: Block) -> list[Trained]:
        return list(self._rows("where level = ? and block = ? and not deleted", block))

    def _rows(self, which: str, values: Sequence[int] = ()) -> Iterator[Trained]:
        rows = self._database.execute(
            "select level, block, files.name, digest, line, documents.name, sequences, tokens, deleted from trained "
            f"join documents on documents.id = document join files on files.id = file {which}",
            values,
        )
        return (
            Trained((level, block), Document(*document), sequences, tokens, bool(deleted))
            for level, block, *document, sequences, tokens, deleted in rows
        )

    def _id(self, document: Document) -> int:
        file = (document.file, document.digest)
        self._database.execute("insert or ignore into files (name, digest) values (?, ?)", file)
        (file_id,) = self._database.execute("select id from files where name = ? and digest = ?", file).fetchone()
        place = (file_id, document.line)
        self._database.execute(
            "insert or ignore into documents (file, line, name) values (?, ?, ?)", (*place, document.name)
        )
        return self._database.execute("select id from documents where file = ? and line = ?", place).fetchone()[0]

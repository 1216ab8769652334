"""The audit of a bank: a SQLite database beside the bank that records which documents trained each block."""

import contextlib
import dataclasses
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from midus_hf.banks.level_file import BankError
from midus_hf.files.whole_files import whole_file

# Level of a block, counted from 1, and index of its record.
Block = tuple[int, int]

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
        file: Name of the file, or of the dataset on the Hub, that contains the document.
        digest: Digest of the file, as `b2sum` prints it, or fingerprint of the dataset.
        line: Line or row of the document in the file, counted from 1.
        name: The document's name in the corpus. Default: None, for a document without a name.
    """

    file: str
    digest: str
    line: int
    name: str | None = None


@dataclass(frozen=True)
class Trained:
    """Record of one document's part in training one block.

    The document was in training sequences that fetched the block.

    Args:
        block: Level and index of the block.
        document: The document in these sequences.
        sequences: Number of these sequences. A sequence that was seen in two epochs counts twice.
        tokens: Number of the document's tokens in all these sequences.
        deleted: Whether the block was deleted since. Default: false.
    """

    block: Block
    document: Document
    sequences: int
    tokens: int
    deleted: bool = False


class BankAudit:
    """Record of the documents that trained each block of a bank.

    Args:
        path: The database. Changes are made in this file. Default: None, for an empty record in an unnamed temporary
            file, which `save` writes to a named one.

    Raises:
        BankError: If there is no file at `path`, or the file is not an audit of this version.
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
        """Save the changes and close the database."""
        self._database.commit()
        self._database.close()

    def load(self, path: Path) -> None:
        """Replace the whole record by one that `save` wrote."""
        with BankAudit(path) as saved:
            self._database.commit()
            saved._database.backup(self._database)

    def save(self, path: Path) -> None:
        """Write the current record to a file, which appears complete or not at all. Every failure is an `OSError`."""
        self._database.commit()
        try:
            with whole_file(path) as partial, contextlib.closing(sqlite3.connect(partial)) as copy:
                self._database.backup(copy)
        except sqlite3.OperationalError as error:
            raise OSError(f"{path} cannot be written: {error}") from error

    def add(self, trained: Iterable[Trained]) -> None:
        """Record which documents trained which blocks, and add to the counts recorded before for the same block and document."""
        trained = list(trained)
        ids = {document: self._id(document) for document in dict.fromkeys(each.document for each in trained)}
        self._database.executemany(
            _ADD, [(*each.block, each.deleted, ids[each.document], each.sequences, each.tokens) for each in trained]
        )

    def add_unrecorded(self, blocks: Iterable[Block]) -> None:
        """Mark blocks as also trained by something that was not recorded."""
        self._database.executemany("insert or ignore into unrecorded values (?, ?)", blocks)

    def delete(self, blocks: Sequence[Block]) -> None:
        """Mark the records of some blocks as records of deleted blocks."""
        for block in blocks:
            gone = [dataclasses.replace(each, deleted=True) for each in self.trained([block]) if not each.deleted]
            self._database.execute("delete from trained where level = ? and block = ? and not deleted", block)
            self.add(gone)
        self._database.executemany("delete from unrecorded where level = ? and block = ?", blocks)

    def take(self, block: Block, other: "BankAudit") -> None:
        """Replace the records of a block by the records that another audit has of the block."""
        self._database.execute("delete from trained where level = ? and block = ?", block)
        self._database.execute("delete from unrecorded where level = ? and block = ?", block)
        self.add(other.trained([block]))
        self.add_unrecorded(other.unrecorded() & {block})

    def unrecorded(self) -> set[Block]:
        """Return the blocks that something trained without a record."""
        return set(self._database.execute("select level, block from unrecorded"))

    def totals(self) -> Iterator[tuple[Block, bool, int, int, int]]:
        """Yield each trained block, whether it was deleted since, and its numbers of documents, sequences and tokens."""
        rows = self._database.execute(
            "select level, block, deleted, count(*), sum(sequences), sum(tokens) from trained group by level, block, deleted "
            "order by level, block, deleted"
        )
        return (((level, block), bool(deleted), *numbers) for level, block, deleted, *numbers in rows)

    def trained(self, blocks: Iterable[Block] | None = None) -> Iterator[Trained]:
        """Yield the records of blocks, one per document, in the order of the blocks, then of `deleted`, file and line.

        Without blocks, yield all records in the order of file and line, then of `deleted` and block.
        """
        if blocks is None:
            return self._rows("order by files.name, digest, line, deleted, level, block")
        return (
            each
            for block in blocks
            for each in self._rows("where level = ? and block = ? order by deleted, files.name, digest, line", block)
        )

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
        file_and_line = (file_id, document.line)
        self._database.execute(
            "insert or ignore into documents (file, line, name) values (?, ?, ?)", (*file_and_line, document.name)
        )
        return self._database.execute(
            "select id from documents where file = ? and line = ?", file_and_line
        ).fetchone()[0]

"""Documents of a corpus, from a file, a folder of files or a dataset on the Hub."""

import dataclasses
import hashlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from midus_hf.topics.documents import RowPlace, document_rows, iterate_documents, text_of_row
from midus_hf.topics.text_files import (
    DocumentError,
    codec_of,
    endings,
    find_files,
    first_line,
    import_datasets,
    is_compressed,
    is_text_name,
)
from midus_hf.training.options import CorpusOptions

_DATASET_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")

# Assumed ratio of the length of a text to that of its compressed file.
_UNPACKED = 5


@dataclasses.dataclass(frozen=True)
class LocalText:
    """Text in a file, or in the files of a folder."""

    options: CorpusOptions
    files: list[Path]

    def documents(self) -> Iterator[str]:
        """Return an iterator over the documents that have a visible character, as `iterate_documents` reads them."""
        return iterate_documents(self.files, self.options.column, self.options.encoding)

    def rows(self) -> Iterator[tuple[RowPlace, Any]]:
        """Return an iterator over the rows of these documents, each with its location, as `document_rows` reads them."""
        return document_rows(self.files, self.options.column, self.options.encoding)

    def size(self) -> int:
        """Estimate the number of bytes of text."""
        return sum(file.stat().st_size * (_UNPACKED if is_compressed(file) else 1) for file in self.files)

    def identity(self) -> list[str]:
        """Return all that decides which documents are read: how files are read, and the kind and digest of each file."""
        digests = list(self.digests().values())
        kinds = ["".join(endings(file)) for file in self.files]
        encoding = codec_of(self.options.encoding)
        return ["files", self.options.column, encoding, *map(" ".join, zip(kinds, digests, strict=True))]

    def digests(self) -> dict[Path, str]:
        """Return the digest of each file as `b2sum` prints it."""
        with ThreadPoolExecutor(usable_cores()) as pool:
            return dict(zip(self.files, pool.map(_digest, self.files), strict=True))

    def name_of(self, file: Path) -> str:
        """Return a file's path relative to the folder that the corpus lies in; the location of that folder stays private."""
        return str(file.relative_to(Path(self.options.path).expanduser().parent))

    def as_dataset(self, folder: Path) -> Any:
        """Return the documents as a `datasets.Dataset` of one column, `options.column`, which is written to `folder`."""
        import datasets

        try:
            return datasets.Dataset.from_generator(
                _rows,
                features=datasets.Features({self.options.column: datasets.Value("large_string")}),
                cache_dir=str(folder),
                gen_kwargs={"options": self.options, "files": tuple(self.files)},
            )
        except datasets.exceptions.DatasetGenerationError as error:
            if isinstance(error.__cause__, (DocumentError, OSError)):
                raise error.__cause__ from None
            raise


@dataclasses.dataclass(frozen=True)
class HubRows:
    """A dataset on the Hub; `dataset` is the result of `datasets.load_dataset`."""

    options: CorpusOptions
    dataset: Any

    def rows(self) -> Iterator[tuple[RowPlace, Any]]:
        """Return an iterator over the rows that have a visible character in the column, each with its location."""
        corpus_label, name = f"corpus {self.options.path!r}", Path(self.options.path)
        rows = ((RowPlace(corpus_label, name, number), row) for number, row in enumerate(self.dataset, start=1))
        return (row for row in rows if text_of_row(row[1], self.options.column, corpus_label).strip())

    def digests(self) -> dict[Path, str]:
        """Return the fingerprint that the library `datasets` computes of the dataset, under the dataset's id."""
        return {Path(self.options.path): self.dataset._fingerprint}

    def name_of(self, file: Path) -> str:
        """Return the id of the dataset."""
        return str(file)

    def documents(self) -> Iterator[str]:
        """Return an iterator over the documents that have a visible character; a row without text raises `DocumentError`."""
        return (row[self.options.column] for _, row in self.rows())

    def size(self) -> int:
        """Return the number of bytes of the text column."""
        return self.as_dataset(None).data.nbytes

    def identity(self) -> list[str]:
        """Return all that decides which documents are read: the column, and the dataset's fingerprint."""
        return ["dataset", self.options.column, self.dataset._fingerprint]

    def as_dataset(self, folder: Path | None) -> Any:
        """Return the text column of the dataset, or raise `DocumentError`; nothing is written to `folder`."""
        text_of_row(dict.fromkeys(self.dataset.column_names, ""), self.options.column, f"corpus {self.options.path!r}")
        return self.dataset.select_columns([self.options.column])


def find_corpus(options: CorpusOptions, seed: int = 0) -> LocalText | HubRows:
    """Return the corpus that options name; local text is not read yet.

    Args:
        seed: Seed of the order in which a streamed dataset is read, if it is shuffled. Default: 0.

    Raises:
        DocumentError: If the corpus does not exist or has no files to read.
    """
    path = Path(options.path).expanduser()
    if path.exists():
        if options.config is not None or options.shuffle_buffer:
            raise DocumentError(
                f"corpus is {options.path!r}, which is local; config and shuffle_buffer are for datasets of the Hub."
            )
        return LocalText(options, find_files(path))
    if is_text_name(path):
        raise _absent("corpus", options.path)
    rows = load_hub_dataset("corpus", options.path, options.config, options.split, options.streaming)
    if options.shuffle_buffer:
        rows = rows.shuffle(seed=seed, buffer_size=options.shuffle_buffer)
    return HubRows(options, rows)


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _digest(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, hashlib.blake2b).hexdigest()
    except OSError as error:
        raise DocumentError(f"file {str(file)!r} cannot be read: {first_line(error)}.") from error


def _rows(options: CorpusOptions, files: tuple[Path, ...]) -> Iterator[dict[str, str]]:
    for document in LocalText(options, list(files)).documents():
        yield {options.column: document}


def load_hub_dataset(name: str, path: str, config: str | None, split: str, streaming: bool = False) -> Any:
    """Load a dataset from the Hub.

    Args:
        config: Configuration of the dataset; None for its default.

    Raises:
        DocumentError: If the dataset does not exist or cannot be loaded, or the package `datasets` is not installed.
    """
    if not _DATASET_ID.fullmatch(path):
        raise _absent(name, path)
    datasets = import_datasets(f"{name} {path!r}")
    try:
        return datasets.load_dataset(path, config, split=split, streaming=streaming)
    except (OSError, ValueError, RuntimeError) as error:
        raise DocumentError(
            f"{name} is {path!r}, which is no file or folder and cannot be loaded as a dataset: {first_line(error)}"
        ) from error


def _absent(name: str, path: str) -> DocumentError:
    return DocumentError(f"{name} is {path!r}, which does not exist; expected a file, a folder or a dataset id.")

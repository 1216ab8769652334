"""Documents of a corpus: from a file, a folder of files, or a dataset of the Hub."""

import dataclasses
import hashlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from midus_hf.documents import (
    DocumentError,
    RowPlace,
    codec_of,
    document_rows,
    endings,
    find_files,
    first_line,
    import_datasets,
    is_compressed,
    is_text_name,
    iterate_documents,
    text_of_row,
)
from midus_hf.training.options import CorpusOptions

_DATASET_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")

_UNPACKED = 5
"""How many times longer than a compressed file its text is taken to be."""


@dataclasses.dataclass(frozen=True)
class LocalText:
    """A file, or the files of a folder."""

    options: CorpusOptions
    files: list[Path]

    def documents(self) -> Iterator[str]:
        """The documents, from the first one on; those without any visible character are left out.

        Raises:
            DocumentError: As `iterate_documents`.
        """
        return iterate_documents(self.files, self.options.column, self.options.encoding)

    def rows(self) -> Iterator[tuple[RowPlace, Any]]:
        """The rows of the documents that `documents` gives, each with where it is.

        Raises:
            DocumentError: As `iterate_documents`; for plain text, which has no rows.
        """
        return document_rows(self.files, self.options.column, self.options.encoding)

    def size(self) -> int:
        """About how many bytes of text there are."""
        return sum(file.stat().st_size * (_UNPACKED if is_compressed(file) else 1) for file in self.files)

    def identity(self) -> list[str]:
        """What decides which documents are read: the bytes of the files, and how they are understood."""
        digests = list(self.digests().values())
        kinds = ["".join(endings(file)) for file in self.files]
        encoding = codec_of(self.options.encoding)
        return ["files", self.options.column, encoding, *map(" ".join, zip(kinds, digests, strict=True))]

    def digests(self) -> dict[Path, str]:
        """The sum of the bytes of each file, as `b2sum` gives it."""
        with ThreadPoolExecutor(usable_cores()) as pool:
            return dict(zip(self.files, pool.map(_digest, self.files), strict=True))

    def name_of(self, file: Path) -> str:
        """A file's name below the folder that the corpus lies in: where that is, is nobody's business."""
        return str(file.relative_to(Path(self.options.path).expanduser().parent))

    def as_dataset(self, folder: Path) -> Any:
        """The documents as a `datasets.Dataset` of one column, `options.column`, which is written to `folder`.

        Raises:
            DocumentError: As `iterate_documents`.
        """
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
    """A dataset of the Hub: `dataset` is what `datasets.load_dataset` gives."""

    options: CorpusOptions
    dataset: Any

    def rows(self) -> Iterator[tuple[RowPlace, Any]]:
        """As `LocalText.rows`."""
        words, name = f"corpus {self.options.path!r}", Path(self.options.path)
        rows = ((RowPlace(words, name, number), row) for number, row in enumerate(self.dataset, start=1))
        return (row for row in rows if text_of_row(row[1], self.options.column, words).strip())

    def digests(self) -> dict[Path, str]:
        """As `LocalText.digests`: what tells the dataset from others, as its library has it."""
        return {Path(self.options.path): self.dataset._fingerprint}

    def name_of(self, file: Path) -> str:
        """The id of the dataset."""
        return str(file)

    def documents(self) -> Iterator[str]:
        """As `LocalText.documents`.

        Raises:
            DocumentError: For rows without text in the column.
        """
        documents = (text_of_row(row, self.options.column, f"corpus {self.options.path!r}") for row in self.dataset)
        return (document for document in documents if document.strip())

    def size(self) -> int:
        """As `LocalText.size`."""
        return self.as_dataset(None).data.nbytes

    def identity(self) -> list[str]:
        """What decides which documents are read: the dataset, as its library tells one from another, and the column."""
        return ["dataset", self.options.column, self.dataset._fingerprint]

    def as_dataset(self, folder: Path | None) -> Any:
        """The column of the dataset, which is where it was: nothing is written.

        Raises:
            DocumentError: If there is no such column.
        """
        text_of_row(dict.fromkeys(self.dataset.column_names, ""), self.options.column, f"corpus {self.options.path!r}")
        return self.dataset.select_columns([self.options.column])


def find_corpus(options: CorpusOptions, seed: int = 0) -> LocalText | HubRows:
    """Find the corpus; nothing of local text is read yet.

    Args:
        options: Where the text comes from.
        seed: Seed of the order in which a streamed dataset is read, if it is shuffled. Default: 0.

    Raises:
        DocumentError: If there is no such corpus or it has no files to read.
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
    """How many cores this process may run on."""
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
    """A dataset of the Hub.

    Args:
        name: The option that names it, for messages.
        path: Its id.
        config: Its configuration; None for its own.
        split: Its split.
        streaming: Whether to read it while it is gone through. Default: false.

    Raises:
        DocumentError: If there is no such dataset, or `datasets` is not installed.
    """
    if not _DATASET_ID.fullmatch(path):
        raise _absent(name, path)
    datasets = import_datasets(f"{name} {path!r}")
    try:
        return datasets.load_dataset(path, config, split=split, streaming=streaming)
    except (OSError, ValueError, RuntimeError) as error:
        raise DocumentError(
            f"{name} is {path!r}, no file or folder here, and not to be had as a dataset: {first_line(error)}"
        ) from error


def _absent(name: str, path: str) -> DocumentError:
    return DocumentError(f"{name} is {path!r}, which does not exist; expected a file, a folder or a dataset id.")

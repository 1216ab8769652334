"""Documents of a corpus: from a file, a folder of files, or a dataset of the Hub."""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from midus_hf.documents import (
    FOLDER_SUFFIXES,
    DocumentError,
    find_files,
    first_line,
    import_datasets,
    iterate_documents,
    text_of_row,
)
from midus_hf.training.options import CorpusOptions

_DATASET_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def open_corpus(options: CorpusOptions, seed: int = 0) -> Callable[[], Iterator[str]]:
    """Find the corpus; what is returned reads it from the start each time it is called.

    Documents without any visible character are left out.

    Args:
        options: Where the text comes from.
        seed: Seed of the order in which a streamed dataset is read, if it is shuffled. Default: 0.

    Raises:
        DocumentError: If there is no such corpus or it has no files to read. Reading raises it too: for what is not
            text, for rows without the column, and for JSON lines that are not JSON.
    """
    path = Path(options.path).expanduser()
    if path.exists():
        if options.config is not None or options.shuffle_buffer:
            raise DocumentError(
                f"corpus is {options.path!r}, which is local; config and shuffle_buffer are for datasets of the Hub."
            )
        files = find_files(path)
        return lambda: iterate_documents(files, options.column, options.encoding)
    if not _DATASET_ID.fullmatch(options.path) or path.suffix in FOLDER_SUFFIXES:
        raise DocumentError(
            f"corpus is {options.path!r}, which does not exist; expected a file, a folder or a dataset id."
        )
    rows = _load_dataset(options, seed)
    return lambda: _read_rows(rows, options)


def _read_rows(rows: Iterable[Any], options: CorpusOptions) -> Iterator[str]:
    documents = (text_of_row(row, options.column, f"corpus {options.path!r}") for row in rows)
    return (document for document in documents if document.strip())


def _load_dataset(options: CorpusOptions, seed: int) -> Iterable[Any]:
    datasets = import_datasets(f"corpus {options.path!r}")
    try:
        dataset = datasets.load_dataset(options.path, options.config, split=options.split, streaming=options.streaming)
    except (OSError, ValueError, RuntimeError) as error:
        raise DocumentError(
            f"corpus is {options.path!r}, no file or folder here, and not to be had as a dataset: {first_line(error)}"
        ) from error
    return dataset.shuffle(seed=seed, buffer_size=options.shuffle_buffer) if options.shuffle_buffer else dataset

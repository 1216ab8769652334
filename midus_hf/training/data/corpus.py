"""Texts of a corpus as rows of a `datasets.Dataset`: files, folders, repositories of datasets, the Hub."""

import glob
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midus_hf.config.wording import first_line
from midus_hf.model_names import check_hub_dataset

if TYPE_CHECKING:
    from datasets import Dataset

# Kinds of files by the ending of their names, in small letters; the name of a kind is that of its reader in `datasets`.
KINDS = {
    **dict.fromkeys((".txt", ".md"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    ".parquet": "parquet",
}
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
_READER_OPTIONS: dict[str, dict[str, Any]] = {
    "text": {"sample_by": "document", "encoding": "utf-8-sig"},
    "csv": {"keep_default_na": False},  # else a text such as "null" is read as no text
}

_DATASET_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def read_corpus(
    corpus: str | Sequence[str],
    *,
    key: str = "corpus",
    split: str | None = None,
    name: str | None = None,
    text_column: str = "text",
) -> "Dataset":
    """Return the texts of a corpus, one per row, with the other columns that the corpus has.

    A text file is one text. JSON (a list, or an object per line), CSV and Parquet have a text per row. Text, JSON and CSV
    may be compressed. Of a folder, files of one kind are read, rows before text, by the splits that `datasets` finds in their
    names or its card. Blank texts are left out, which a line on standard error says, as it does of files that are not read.

    Args:
        corpus: A file, a folder, or the id of a dataset on the Hub, or several of these.
        key: Key of the arguments that names the corpus, for messages. Default: `"corpus"`.
        split: Split of the corpus, perhaps with a slice as in `"train[:10%]"`. Default: the only one, or `train`.
        name: Configuration of a dataset on the Hub or of a downloaded one. Default: the dataset's own.
        text_column: Column that holds the text. Default: `"text"`.

    Raises:
        ValueError: If the corpus does not exist, cannot be read, has no text, or lacks the column or the split.
    """
    rows = read_rows(key, corpus, split=split, name=name, text_column=text_column)
    columns, label = rows.column_names, _label(key, corpus)
    if text_column not in columns:
        raise ValueError(
            f"{label} has no column {text_column!r}, only {', '.join(columns) or 'nothing'}; set text_column to the column "
            "that holds the text."
        )
    kind = getattr(rows.features[text_column], "dtype", "list")
    if kind not in ("string", "large_string", "null"):
        raise ValueError(
            f"{label} has {kind} under {text_column!r}; expected text. Set text_column to the column that holds the text."
        )
    whole = len(rows)
    rows = rows.filter(
        lambda texts: [bool(text and text.strip()) for text in texts], batched=True, input_columns=[text_column]
    )
    if not len(rows):
        raise ValueError(f"{label} is empty: it has no text with a visible character. Add text to it.")
    if len(rows) < whole:
        say(f"{label}: {whole - len(rows):,} of {whole:,} texts are blank and left out")
    return rows


def read_rows(
    key: str,
    sources: str | Sequence[str],
    *,
    split: str | None = None,
    name: str | None = None,
    text_column: str | None = None,
) -> "Dataset":
    """Return the rows of files, folders and datasets of the Hub, as `read_corpus` reads them, with any columns.

    Args:
        key: Key of the arguments that names the sources, for messages.
        text_column: Column that gets the text of text files. Default: None, text files have no rows and are not read.

    Raises:
        ValueError: If a source does not exist, cannot be read or has no rows, or lacks the split.
    """
    import datasets

    names = [sources] if isinstance(sources, str) else list(sources)
    if not names or "" in names:
        raise ValueError(f"{key} is empty; expected a file, a folder or a dataset id.")
    parts = [_read_source(key, source, split, name, text_column) for source in names]
    try:
        return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{_label(key, sources)} has columns that differ in type from file to file: {_reason(error)}"
        ) from error


def say(line: str) -> None:
    """Print a line on standard error, in the first process of a run alone."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(line, file=sys.stderr, flush=True)


def _label(key: str, sources: str | Sequence[str]) -> str:
    return f"{key} {sources!r}" if isinstance(sources, str) else f"{key} {', '.join(map(repr, sources))}"


def _reason(error: BaseException) -> str:
    """Return the first line of what caused an error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)


def _kind_of(path: Path) -> str | None:
    """Return the kind of a file by its name; None if no kind has this name."""
    endings = [suffix.lower() for suffix in path.suffixes]
    if endings and endings[-1] in _COMPRESSIONS:
        kind = KINDS.get(endings[-2]) if len(endings) > 1 else None
        return None if kind == "parquet" else kind
    return KINDS.get(endings[-1]) if endings else None


def _read_source(key: str, source: str, split: str | None, name: str | None, text_column: str | None) -> "Dataset":
    """Return the rows of one file, folder or dataset of the Hub; arguments are as in `read_rows`."""
    import datasets

    path = Path(source).expanduser()
    if not path.exists() and (not _DATASET_ID.fullmatch(source) or _kind_of(path) is not None):
        raise ValueError(f"{key} is {source!r}, which does not exist; expected a file, a folder or a dataset id.")
    if "::" in source or (path.is_dir() and glob.escape(source) != source):
        raise ValueError(
            f"{key} is {source!r}; the package datasets reads '::', '[', '*' and '?' in a path as a pattern. Rename the file or the "
            "folder."
        )
    if not path.exists():
        check_hub_dataset(f"{key} is {source!r}, which is no file or folder", source)
    kind = _kind_of_files(key, path, text_column is not None) if path.exists() else None
    try:
        if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
            rows: Any = datasets.load_from_disk(str(path))
        elif kind is None:
            rows = datasets.load_dataset(source, name, split=split)
        else:
            rows = _read_files(key, path, kind, split, name)
    except Exception as error:
        raise ValueError(f"{key} is {source!r}, which cannot be read: {_reason(error)}") from error
    if isinstance(rows, datasets.DatasetDict):
        chosen = split or (next(iter(rows)) if len(rows) == 1 else "train")
        if chosen not in rows:
            raise ValueError(
                f"{key} is {source!r}, which has the splits {', '.join(rows)}, and not {chosen!r}; name one of them."
            )
        if len(rows) > 1:
            say(f"{key} {source!r}: split {chosen!r} is read, of {', '.join(rows)}")
        rows = rows[chosen]
    return rows.rename_column("text", text_column) if kind == "text" and text_column not in (None, "text") else rows


def _kind_of_files(key: str, path: Path, takes_text: bool) -> str:
    """Return the kind of a file, or the most frequent kind of row files in a folder, or else text."""
    if path.is_file():
        kinds = Counter([_kind_of(path) or "text"])
    else:
        kinds = Counter(kind for file in path.rglob("*") if (kind := _kind_of(file)) is not None)
    of_rows = [kind for kind, _ in kinds.most_common() if kind != "text"]
    if not of_rows and (not kinds or not takes_text):
        endings = ", ".join(ending for ending, kind in KINDS.items() if takes_text or kind != "text")
        content = "text" if takes_text else "rows"
        raise ValueError(f"{key} is {str(path)!r}, which has no {content}; expected files ending in {endings}.")
    return of_rows[0] if of_rows else "text"  # the card and notes of a dataset are not its text


def _read_files(key: str, path: Path, kind: str, split: str | None, name: str | None) -> Any:
    """Return the rows of the files of one kind, and say which files of a folder are not read."""
    import datasets

    options = dict(_READER_OPTIONS.get(kind, {}))
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if not file.is_dir())
    files = [
        file for file in files if path.is_file() or not any(part[0] == "." for part in file.relative_to(path).parts)
    ]
    for file in files:
        file.stat()  # `datasets` would pass over a link to what is gone
    if path.is_dir() and kind != "text":
        builder = datasets.load_dataset_builder(str(path), name, **options)
    else:
        options |= {"sep": "\t"} if ".tsv" in path.name.lower() else {}
        texts = [glob.escape(str(file.resolve())) for file in files if path.is_file() or _kind_of(file) == kind]
        builder = datasets.load_dataset_builder(kind, name, data_files=texts, **options)
    read = {Path(file).resolve() for of_split in builder.config.data_files.values() for file in of_split}
    unread = Counter("".join(file.suffixes[-2:]) or file.name for file in files if file.resolve() not in read)
    if unread:
        named = ", ".join(f"{count:,} {ending}" for ending, count in unread.most_common(5))
        say(
            f"{key} {str(path)!r}: {len(files) - unread.total():,} of {len(files):,} files are read; not read: {named}"
        )
    builder.download_and_prepare()
    return builder.as_dataset(split=split)

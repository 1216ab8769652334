"""Texts of a corpus as rows of a `datasets.Dataset`: files, folders, repositories of datasets, the Hub."""

import contextlib
import glob
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midus_hf.config.wording import first_line
from midus_hf.model_names import check_hub_dataset

if TYPE_CHECKING:
    from datasets import Dataset

# Kinds of files by the ending of their names, in small letters; the name of a kind is that of its reader in `datasets`,
# which is `csv` for `tsv`.
KINDS = {
    **dict.fromkeys((".txt", ".md"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
_READER_OPTIONS: dict[str, dict[str, Any]] = {
    "text": {"sample_by": "document", "encoding": "utf-8-sig"},
    "csv": {"keep_default_na": False},  # else a text such as "null" is read as no text
    "tsv": {"keep_default_na": False, "sep": "\t"},
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
    resolved = os.path.realpath(path)
    is_id = _DATASET_ID.fullmatch(source) and _kind_of(path) is None and source not in KINDS.values()
    if not path.exists() and not is_id:  # `datasets` reads the current folder for an id such as `json`
        raise ValueError(f"{key} is {source!r}, which does not exist; expected a file, a folder or a dataset id.")
    if path.exists() and ("::" in resolved or (path.is_dir() and glob.escape(resolved) != resolved)):
        raise ValueError(
            f"{key} is {source!r}; the package datasets reads '::', '[', '*' and '?' in a path as a pattern. Rename the file or the "
            "folder."
        )
    is_saved = (path / "state.json").exists() or (path / "dataset_dict.json").exists()
    if name is not None and path.exists() and (is_saved or not _declares_data(path)):
        raise ValueError(
            f"{key} is {source!r}, which has no configurations, and {name!r} is named as one; leave the name out."
        )
    if not path.exists():
        check_hub_dataset(f"{key} is {source!r}, which is no file or folder", source)
        with _reading(f"{key} is {source!r}"):
            rows: Any = datasets.load_dataset(source, name, split=split)
    elif is_saved:
        with _reading(f"{key} is {source!r}"):
            rows = datasets.load_from_disk(str(path))
        if split is not None and isinstance(rows, datasets.Dataset):
            raise ValueError(f"{key} is {source!r}, which has no splits, and {split!r} is named as one; leave it out.")
    elif _declares_data(path):
        rows = _read_declared(key, path, split, name)
    else:
        rows = _read_files(key, path, split, text_column)
    if isinstance(rows, datasets.DatasetDict):
        chosen = split or (next(iter(rows)) if len(rows) == 1 else "train")
        if chosen not in rows:
            raise ValueError(
                f"{key} is {source!r}, which has the splits {', '.join(rows)}, and not {chosen!r}; name one of them."
            )
        if len(rows) > 1:
            say(f"{key} {source!r}: split {chosen!r} is read, of {', '.join(rows)}")
        rows = rows[chosen]
    return rows


@contextlib.contextmanager
def _reading(beginning: str) -> Iterator[None]:
    """Turn what `datasets` raises inside the context into a `ValueError` in one line, which begins as given."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{beginning}, which cannot be read: {_reason(error)}") from error


def _declares_data(folder: Path) -> bool:
    """Return whether a folder is a repository of a dataset, whose card says which files are its data."""
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    head = text[3:].partition("\n---")[0] if text.startswith("---") else ""
    return re.search(r"^(configs|dataset_info):", head, re.MULTILINE) is not None


def _read_declared(key: str, folder: Path, split: str | None, name: str | None) -> Any:
    """Return the rows of the files that the card of a folder names, and say which are not read."""
    import datasets

    with _reading(f"{key} is {str(folder)!r}"):
        builder = datasets.load_dataset_builder(str(folder.resolve()), name)
        options = (each for each in _READER_OPTIONS.values() if all(hasattr(builder.config, key) for key in each))
        builder = datasets.load_dataset_builder(str(folder.resolve()), name, **next(options, {}))
        read = [Path(file).resolve() for of_split in builder.config.data_files.values() for file in of_split]
        _say_unread(key, folder, _files_of(key, folder), read)
        builder.download_and_prepare()
        return builder.as_dataset(split=split)


def _read_files(key: str, path: Path, split: str | None, text_column: str | None) -> Any:
    """Return the rows of a file, or of the files of one kind in a folder, and say which are not read.

    The kind is the most frequent kind of rows, or else text: the card and notes of a dataset are not its text.
    """
    import datasets

    files = _files_of(key, path)
    kind_of = {file: _kind_of(file) or ("text" if file == path else None) for file in files}
    kinds = [kind for kind, _ in Counter(kind_of.values()).most_common() if kind is not None]
    kind = next((kind for kind in kinds if kind != "text"), "text")
    if not kinds or (kind == "text" and text_column is None):
        endings = ", ".join(ending for ending, kind in KINDS.items() if text_column or kind != "text")
        content = "text" if text_column else "rows"
        raise ValueError(f"{key} is {str(path)!r}, which has no {content}; expected files ending in {endings}.")
    read = [file for file in files if kind_of[file] == kind and file.stat().st_size]
    if not read:
        expected = "text with a visible character" if text_column else "row"
        raise ValueError(f"{key} is {str(path)!r}, which is empty: it has no {expected}. Add text to it.")
    splits = {"train": read} if kind == "text" or path.is_file() else _by_split(key, path, read)
    read = [file for of_split in splits.values() for file in of_split]
    _say_unread(key, path, files, read)

    def prepared(files: Mapping[str, Sequence[Path]]) -> Any:
        data_files = {name: [glob.escape(str(file.resolve())) for file in each] for name, each in files.items()}
        reader, options = "csv" if kind == "tsv" else kind, _READER_OPTIONS.get(kind, {})
        builder = datasets.load_dataset_builder(reader, data_files=data_files, **options)
        builder.download_and_prepare()
        return builder

    try:
        with _reading(f"{key} is {str(path)!r}"):
            builder = prepared(splits)
    except ValueError:
        for file in read if path.is_dir() else ():  # the error of `datasets` does not say which file it is about
            with _reading(f"{key} has the file {str(file)!r}"):
                prepared({"train": [file]})
        raise
    with _reading(f"{key} is {str(path)!r}"):
        rows = builder.as_dataset(split=split)
    if kind != "text":
        return rows
    for file, text in zip(read, builder.as_dataset(split="train")["text"], strict=False):
        if "\0" in text:  # zero bytes are valid UTF-8, but no text
            raise ValueError(
                f"{key} has the file {str(file)!r}, which is not text: it has zero bytes. Take it out, or convert it."
            )
    return rows if text_column in (None, "text") else rows.rename_column("text", text_column)


def _files_of(key: str, path: Path) -> list[Path]:
    """Return a file, or the sorted files of a folder without hidden ones."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if not file.is_dir())
    if path.is_dir():
        files = [file for file in files if not any(part[0] == "." for part in file.relative_to(path).parts)]
    with _reading(f"{key} is {str(path)!r}"):
        for file in files:
            file.stat()  # `datasets` would pass over a link to what is gone
    return files


def _by_split(key: str, folder: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the files of a folder by the splits that `datasets` finds in names; all are `train` if none of them has one."""
    from datasets.data_files import DataFilesDict, get_data_patterns

    base = str(folder.resolve())
    with _reading(f"{key} is {str(folder)!r}"):
        patterns = DataFilesDict.from_patterns(get_data_patterns(base), base_path=base)
    names = {str(split): {Path(name).resolve() for name in matched} for split, matched in patterns.items()}
    splits = {split: [file for file in files if file.resolve() in matched] for split, matched in names.items()}
    return {split: of_kind for split, of_kind in splits.items() if of_kind} or {"train": list(files)}


def _say_unread(key: str, path: Path, files: Sequence[Path], read: Sequence[Path]) -> None:
    """Say which files of a folder are not read."""
    named = {file.resolve() for file in read}
    unread = Counter("".join(file.suffixes[-2:]) or file.name for file in files if file.resolve() not in named)
    if unread:
        endings = ", ".join(f"{count:,} {ending}" for ending, count in unread.most_common(5))
        say(
            f"{key} {str(path)!r}: {len(files) - unread.total():,} of {len(files):,} files are read; not read: {endings}"
        )

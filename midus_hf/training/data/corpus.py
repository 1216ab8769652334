"""Texts of a corpus as rows of a `datasets.Dataset`: files of any kind, folders, repositories of datasets, the Hub."""

import glob
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
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

# Words in names of files and folders by which published datasets mark their splits.
_SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
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
    may be compressed. Blank texts are left out, which a line on standard error says, as it does of files that are not read.
    Fields of a column `metadata`, where datatrove keeps its results, become columns.

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
    parts: list[Dataset] = []
    for source in names:
        path = Path(source).expanduser()
        parts += (
            _read_local(key, path, split, name, text_column)
            if path.exists()
            else [_read_hub(key, source, split, name)]
        )
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


def _loaded(key: str, source: object, load: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return what a function of `datasets` loads, or raise a `ValueError` that names the source."""
    try:
        return load(*arguments, **options)
    except Exception as error:
        raise ValueError(f"{key} is {str(source)!r}, which cannot be read: {_reason(error)}") from error


def _kind_of(path: Path) -> str | None:
    """Return the kind of a file by its name; None if no kind has this name."""
    endings = [suffix.lower() for suffix in path.suffixes]
    if endings and endings[-1] in _COMPRESSIONS:
        kind = KINDS.get(endings[-2]) if len(endings) > 1 else None
        return None if kind == "parquet" else kind
    return KINDS.get(endings[-1]) if endings else None


def _read_local(key: str, path: Path, split: str | None, name: str | None, text_column: str | None) -> "list[Dataset]":
    """Return the rows of a file or a folder, a dataset for each kind of file."""
    import datasets

    if "::" in str(path):
        raise ValueError(
            f"{key} is {str(path)!r}; the package datasets reads '::' in a path as a chain. Rename the file or the folder."
        )
    if path.is_dir() and ((path / "state.json").exists() or (path / "dataset_dict.json").exists()):
        return [_split_of(key, path, _loaded(key, path, datasets.load_from_disk, str(path)), split)]
    if path.is_dir() and _declares_data(path):
        loaded = _loaded(key, path, datasets.load_dataset, glob.escape(str(path)), name)
        return [_split_of(key, path, loaded, split)]
    if name is not None:
        raise ValueError(
            f"{key} is {str(path)!r}, which has no configurations, and {name!r} is named as one; leave the name out."
        )
    files = _files_of_folder(key, path, split, text_column) if path.is_dir() else [path]
    files = [file for file in files if _size_of(key, file)]
    if not files:
        expected = "row" if text_column is None else "text with a visible character"
        raise ValueError(f"{key} is {str(path)!r}, which is empty: it has no {expected}. Add text to it.")
    by_reader: dict[tuple[str, str], list[Path]] = defaultdict(list)
    for file in files:
        kind = _kind_of(file) or "text"
        if kind == "text" and text_column is None:
            raise ValueError(
                f"{key} is {str(file)!r}, which has no rows; expected a file ending in "
                f"{', '.join(ending for ending, kind in KINDS.items() if kind != 'text')}."
            )
        by_reader[kind, "\t" if ".tsv" in file.name.lower() else ","].append(file)
    base = (split or "train").partition("[")[0]
    parts = []
    for (kind, separator), group in by_reader.items():
        options = {**_READER_OPTIONS.get(kind, {}), **({"sep": separator} if kind == "csv" else {})}

        def load(files: list[Path], kind: str = kind, options: dict[str, Any] = options) -> "Dataset":
            data_files = {base: [glob.escape(str(file.resolve())) for file in files]}
            return datasets.load_dataset(kind, data_files=data_files, split=split or base, **options)

        try:
            rows = load(group)
        except Exception as error:
            for file in group:  # the error of `datasets` does not say which file it is about
                _loaded(key, file, load, [file])
            raise ValueError(f"{key} is {str(path)!r}, which cannot be read: {_reason(error)}") from error
        if kind == "text":
            for file, text in zip(group, rows["text"], strict=False):
                if "\0" in text:  # zero bytes are valid UTF-8, but no text
                    raise ValueError(f"file {str(file)!r} is not text: it has zero bytes. Take it out, or convert it.")
            rows = rows.rename_column("text", text_column) if text_column != "text" else rows
        parts.append(_with_metadata(rows))
    return parts


def _size_of(key: str, file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:  # a link to what is gone, or to itself
        raise ValueError(
            f"{key} has the file {str(file)!r}, which cannot be read: {error.strerror}. Take it out, or put it back."
        ) from error


def _declares_data(folder: Path) -> bool:
    """Return whether a folder is a repository of a dataset, whose card says which files are its data."""
    card = folder / "README.md"
    if not card.is_file():
        return False
    text = card.read_text(encoding="utf-8", errors="replace")
    head = text[3:].partition("\n---")[0] if text.startswith("---") else ""
    return re.search(r"^(configs|dataset_info):", head, re.MULTILINE) is not None


def _files_of_folder(key: str, folder: Path, split: str | None, text_column: str | None) -> list[Path]:
    """Return the files of a folder that are read, sorted; say which are not read."""
    every = sorted(
        Path(parent, name)
        for parent, folders, names in os.walk(folder)
        if not (folders.sort() or any(part.startswith(".") for part in Path(parent).relative_to(folder).parts))
        for name in names
        if not name.startswith(".")
    )
    read = [file for file in every if _kind_of(file) is not None]
    rows = [file for file in read if _kind_of(file) != "text"]
    if rows or text_column is None:  # the card and notes of a dataset are not its text
        read = rows
    if not read:
        raise ValueError(
            f"{key} is {str(folder)!r}, a folder without data; expected files ending in {', '.join(KINDS)}."
        )
    splits = {file: _split_in_name(file.relative_to(folder)) for file in read} if rows else {}
    chosen = (split or "train").partition("[")[0]
    if any(splits.values()):
        known = sorted({each for each in splits.values() if each})
        if chosen not in known:
            raise ValueError(
                f"{key} is {str(folder)!r}, which has the splits {', '.join(known)}, and not {chosen!r}; name one of them."
            )
        read = [file for file in read if splits[file] == chosen]
        say(f"{key} {str(folder)!r}: split {chosen!r} is read, of {', '.join(known)}")
    elif split is not None and chosen != "train":
        raise ValueError(f"{key} is {str(folder)!r}, whose files name no splits, and not {chosen!r}; leave it out.")
    others = Counter("".join(file.suffixes[-2:]) or file.name for file in set(every) - set(read))
    if others:
        kinds = ", ".join(f"{count:,} {ending}" for ending, count in others.most_common(5))
        say(f"{key} {str(folder)!r}: {len(read):,} of {len(every):,} files are read; not read: {kinds}")
    return read


def _split_in_name(path: Path) -> str | None:
    """Return the split that the words of a file's path within its folder name; None if they name none."""
    parts = re.split(r"[^a-z]+", "/".join(path.parts).lower())
    return next((_SPLIT_WORDS[word] for word in reversed(parts) if word in _SPLIT_WORDS), None)


def _split_of(key: str, source: object, dataset: Any, split: str | None) -> "Dataset":
    """Return the named split of a dataset, its only one, or `train`."""
    import datasets

    if isinstance(dataset, datasets.Dataset):
        if split is not None:
            raise ValueError(f"{key} is {str(source)!r}, which has no splits, and not {split!r}; leave it out.")
        return _with_metadata(dataset)
    base, bracket, part = (split or (next(iter(dataset)) if len(dataset) == 1 else "train")).partition("[")
    if base not in dataset:
        raise ValueError(
            f"{key} is {str(source)!r}, which has the splits {', '.join(dataset)}, and not {base!r}; name one of them."
        )
    if len(dataset) > 1:
        say(f"{key} {str(source)!r}: split {base!r} is read, of {', '.join(dataset)}")
    rows = dataset[base]
    if bracket:
        instruction = datasets.ReadInstruction.from_spec(base + bracket + part)
        piece = instruction.to_absolute({base: len(rows)})[0]
        rows = rows.select(range(piece.from_ or 0, len(rows) if piece.to is None else piece.to))
    return _with_metadata(rows)


def _read_hub(key: str, name_of_dataset: str, split: str | None, name: str | None) -> "Dataset":
    import datasets

    if not _DATASET_ID.fullmatch(name_of_dataset) or _kind_of(Path(name_of_dataset)) is not None:
        raise ValueError(
            f"{key} is {name_of_dataset!r}, which does not exist; expected a file, a folder or a dataset id."
        )
    check_hub_dataset(f"{key} is {name_of_dataset!r}, which is no file or folder", name_of_dataset)
    loaded = _loaded(key, name_of_dataset, datasets.load_dataset, name_of_dataset, name)
    return _split_of(key, name_of_dataset, loaded, split)


def _with_metadata(rows: "Dataset") -> "Dataset":
    """Return rows with the fields of their column `metadata` as columns, except where a column has the name already."""
    import datasets

    fields = rows.features.get("metadata")
    free = [field for field in fields if field not in rows.column_names] if isinstance(fields, dict) else []
    if not free:
        return rows
    lifted = rows.select_columns(["metadata"]).flatten().select_columns([f"metadata.{field}" for field in free])
    return datasets.concatenate_datasets(
        [rows, lifted.rename_columns({f"metadata.{field}": field for field in free})], axis=1
    )

"""Texts and rows from files, folders and the Hub, as a `datasets.Dataset` or a stream; paths in rows."""

import contextlib
import csv
import glob
import importlib.util
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from midus_hf.config.errors import RequestError, first_few, first_line, no_column, print_note, save_as_utf8
from midus_hf.files.checkpoint_files import is_lfs_pointer
from midus_hf.sources.downloads import as_download_error, fetching
from midus_hf.sources.names import check_hub_id
from midus_hf.sources.progress import limit_bars

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

# Kinds by file extension: names of readers.
KINDS = {
    **dict.fromkeys((".txt", ".md"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
ROW_SUFFIXES = tuple(ending for ending, kind in KINDS.items() if kind != "text")
_COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
# By kind. Quotes in a TSV file are text.
_READER_OPTIONS: dict[str, dict[str, Any]] = {
    "text": {"sample_by": "document", "encoding": "utf-8-sig"},
    "tsv": {"sep": "\t", "quoting": csv.QUOTE_NONE},
}

# Column of documents with paths: the fingerprint of the tree that gave the paths.
TREE_COLUMN = "memory_tree"
# Types of columns with text, as `datasets` names those of Arrow.
TEXT_KINDS = ("string", "large_string", "string_view")
_FILE_COLUMN = "file"  # of texts in a folder
STREAMED_FILE_COLUMN = "_midus_file"  # of rows of a stream: the file that has them, where it is known
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

    A text file is one text; if a single folder is read without a split, its name relative to the folder is in the column `file`. JSON
    (a list, or an object per line), CSV, TSV and Parquet have a text per row. JSON values keep their types, table columns are text.
    All but Parquet may be compressed. In a folder, only files of one kind are read, rows in preference to text, by the splits that
    `datasets` finds in their names or the folder's card. Files that are not read and blank texts are noted.

    Args:
        corpus: A file, a folder, or the id of a dataset on the Hub, or several of these.
        key: Key of the arguments that names the corpus, for messages.
        split: Split of the corpus, perhaps with a slice as in `"train[:10%]"`. Default: the only one, or `train`.
        name: Configuration of a dataset on the Hub or of a downloaded one. Default: the dataset's default.
        text_column: Column that holds the text.

    Raises:
        RequestError: If the corpus does not exist, cannot be read, or lacks text, column or split; or without `datasets`.
    """
    rows = read_rows(key, corpus, split=split, name=name, text_column=text_column)
    columns = rows.column_names
    label = _label(key, corpus)
    if text_column not in columns:
        raise RequestError(no_column(label, text_column, columns))
    kind = getattr(rows.features[text_column], "dtype", type(rows.features[text_column]).__name__)
    if kind not in (*TEXT_KINDS, "null"):
        if kind == "JsonText":
            values = enumerate(rows[text_column], start=1)
            number, value = next((at, value) for at, value in values if not isinstance(value, str | None))
            kind = f"{value!r:.60} in row {number},"
        raise RequestError(
            f"{label} has {kind} under {text_column!r}; expected text. Set text_column (--column of eval, look and cluster) to "
            "the column that holds the text."
        )
    whole = len(rows)
    try:
        with limit_bars():
            kept = {"batched": True, "input_columns": [text_column]}
            rows = rows.filter(lambda texts: [bool(text and text.strip()) for text in texts], **kept)
    except UnicodeDecodeError as error:
        raise RequestError(f"a row of {label} is not text in UTF-8: {error}. Remove it, or convert it.") from error
    if not len(rows):
        raise RequestError(f"{label} is empty: it has no text with a visible character. Add text to it.")
    if len(rows) < whole:
        print_note(f"{label}: {whole - len(rows):,} of {whole:,} texts are blank or missing, and are left out")
    return rows


def read_rows(
    key: str,
    sources: str | Sequence[str],
    *,
    split: str | None = None,
    name: str | None = None,
    text_column: str | None = None,
    columns: Sequence[str] | None = None,
) -> Any:
    """Return rows of files, folders and Hub datasets as `read_corpus` reads and refuses them, any columns.

    Args:
        text_column: Column that gets the text of text files. Default: None, text files have no rows and are not read.
        columns: Columns of a stream, text first, that are read where rows have them; `stream_files` identifies its files. The file of
            each row is under `STREAMED_FILE_COLUMN`, except for rows of a saved dataset. Slices of splits are refused, and file
            contents when they are read. Default: None, a `datasets.Dataset`.
    """
    if columns is not None:
        if split is not None and "[" in split:
            raise RequestError(f"{key}_split is {split!r}, and a stream has no slices; expected whole splits.")
        text_column = columns[0]
    names = [sources] if isinstance(sources, str) else list(sources)
    if not names or "" in names:
        raise RequestError(f"{key} is empty; expected a file, a folder or a dataset id.")
    if importlib.util.find_spec("datasets") is None:
        raise RequestError(
            f"{_label(key, sources)} needs the package datasets, not installed; run: pip install datasets"
        )
    import datasets

    with limit_bars():
        names_files = len(names) == 1 and split is None
        parts = [_read_source(key, each, split, name, text_column, columns, names_files) for each in names]
    try:
        return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)
    except RequestError:  # about the first rows of a table
        raise
    except (ValueError, TypeError) as error:
        raise RequestError(
            f"{_label(key, sources)} has columns that differ in type from file to file: {_cause(error)[1]}"
        ) from error


class DocumentPaths(NamedTuple):
    """Paths of texts, `[texts, p]`, int64, -1 for the generic memory; and their tree's fingerprint."""

    paths: np.ndarray
    tree: str | None


def read_paths(rows: "Dataset", path_column: str, label: str = "the corpus") -> DocumentPaths:
    """Read the paths of texts, of one length and tree, from a column that messages call `label`."""
    if path_column not in rows.column_names:
        raise RequestError(
            f"{label} has no column {path_column!r}, only {', '.join(rows.column_names)}; set path_column to the column with the "
            "paths of texts, which midus cluster assign writes."
        )
    paths = list(rows[path_column])
    for number, path in enumerate(paths, start=1):
        is_list = isinstance(path, list) and path and all(type(node) is int for node in path)
        if not is_list or len(path) != len(paths[0]) or (min(path) < 0 and {*path} != {-1}):
            raise RequestError(
                f"row {number} of {label}, without blank ones, has {path!r} under {path_column!r}; expected the node at each level "
                "of the tree, as midus cluster assign writes it, such as [3, 52, 840], or -1 at each level, the path of the generic "
                "memory."
            )
    trees = rows.unique(TREE_COLUMN) if TREE_COLUMN in rows.column_names else [None]
    if len(trees) > 1:
        named = " and ".join("nothing" if tree is None else f"{str(tree)[:16]}..." for tree in trees[:2])
        raise RequestError(
            f"{label} has {named} under {TREE_COLUMN!r}, next to the paths under {path_column!r}; expected paths of one tree. "
            "Assign all documents by the same tree."
        )
    return DocumentPaths(np.array(paths, dtype=np.int64).reshape(len(paths), -1), trees[0])


def _label(key: str, sources: str | Sequence[str]) -> str:
    return f"{key} {sources!r}" if isinstance(sources, str) else f"{key} {', '.join(map(repr, sources))}"


def _cause(error: BaseException) -> tuple[BaseException, str]:
    while error.__cause__ is not None:
        error = error.__cause__
    return error, first_line(error).removesuffix(".")


def _kind_of(path: Path) -> str | None:
    *_, before, last = ["", "", *(suffix.lower() for suffix in path.suffixes)]
    kind = KINDS.get(before if last in _COMPRESSED_SUFFIXES else last)
    return None if kind == "parquet" and last in _COMPRESSED_SUFFIXES else kind


def _read_source(
    key: str,
    source: str,
    split: str | None,
    name: str | None,
    text_column: str | None,
    columns: Sequence[str] | None,
    names_files: bool,
) -> Any:
    """Return the rows of one split of a file, folder or dataset; a stream of `columns` if given."""
    import datasets

    path = Path(source).expanduser()
    subject = f"{key} is {source!r}"
    resolved = os.path.realpath(path)
    # `datasets` reads the current folder for an id such as `json`.
    may_be_id = _DATASET_ID.fullmatch(source) and _kind_of(Path(source)) is None and source not in KINDS.values()
    if not path.exists() and not may_be_id:
        raise RequestError(f"{subject}, which does not exist; expected a file, a folder or a dataset id.")
    if path.exists() and ("::" in resolved or (path.is_dir() and glob.escape(resolved) != resolved)):
        raise RequestError(f"{subject}; datasets reads '::', '[', '*' and '?' in a path as a pattern. Rename it.")
    is_saved = any((path / file).exists() for file in ("state.json", "dataset_dict.json"))  # by `save_to_disk`
    is_declared = not path.exists()
    card = path / "README.md"
    if card.is_file() and not is_saved:  # the card of a dataset repository lists its data files
        text = card.read_text(encoding="utf-8", errors="replace")
        head = text[3:].partition("\n---")[0] if text.startswith("---") else ""
        is_declared = re.search(r"^(configs|dataset_info):", head, re.MULTILINE) is not None
    if name is not None and not is_declared:
        raise RequestError(f"{subject}, which has no configurations, but {name!r} was given; leave the name out.")
    if is_saved:
        refuse_pointers(key, [file for file in path.rglob("*.arrow") if file.is_file()])
        with convert_read_errors(subject):
            rows: Any = datasets.load_from_disk(str(path))
        if split is not None and isinstance(rows, datasets.Dataset):
            raise RequestError(f"{subject}, which has no splits, but {split!r} was given; leave it out.")
    elif is_declared:
        rows = _read_declared(key, source, path, split, name, columns)
    else:
        rows = _read_files(key, path, split, text_column, columns, names_files)
    if isinstance(rows, dict):
        chosen = split or (next(iter(rows)) if len(rows) == 1 else "train")
        if chosen not in rows:
            raise RequestError(
                f"{subject}, which has the splits {', '.join(rows)}, and not {chosen!r}; name one of them."
            )
        if len(rows) > 1:
            print_note(f"{key} {source!r}: split {chosen!r} is read, of {', '.join(rows)}")
        rows = rows[chosen]
    if columns is None:
        return rows
    if rows.column_names is not None and text_column not in rows.column_names:
        others = [each for each in rows.column_names if each != STREAMED_FILE_COLUMN]
        raise RequestError(no_column(_label(key, source), columns[0], others))
    if isinstance(rows, datasets.Dataset):
        files = [Path(each["filename"]) for each in rows.cache_files]
        rows = rows.to_iterable_dataset()
        rows.info.description = _description(files)
    if rows.column_names is None:
        return rows
    return rows.select_columns([each for each in (*columns, STREAMED_FILE_COLUMN) if each in rows.column_names])


def _streamed_rows(builder: Any, key: str, split: str | None, columns: Sequence[str]) -> Any:
    """Return a stream of a builder's rows, with the file of each if the builder makes tables."""
    import datasets

    from midus_hf.data.readers import JsonReader, ParquetReader

    if isinstance(builder, JsonReader | ParquetReader):
        builder.take(columns)
    files = [name for of_split in (builder.config.data_files or {}).values() for name in of_split]
    builder.info.description = _description([name if "://" in name else Path(name) for name in files])
    if isinstance(builder, datasets.ArrowBasedBuilder):
        builder._generate_tables = _with_file_names(key, builder._generate_tables)
    rows = builder.as_streaming_dataset(split=split)
    for of_split in rows.values() if isinstance(rows, dict) else [rows]:
        if of_split.features is not None and isinstance(builder, datasets.ArrowBasedBuilder):
            of_split.info.features[STREAMED_FILE_COLUMN] = datasets.Value("string")
    return rows


def _with_file_names(key: str, generate: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    import pyarrow

    def generate_tables(**shard: Any) -> Iterator[Any]:
        names = shard.get("base_files") or shard.get("files") or [None]
        file = None if names[0] is None else str(names[0]).rpartition("::")[2]
        remedy = "" if file is None or "://" in file else ". Repair the file, or remove it."
        with convert_read_errors(key if file is None else f"{key} has the file {file!r}", remedy, file or key):
            for place, table in generate(**shard):
                column = pyarrow.nulls(len(table)) if file is None else pyarrow.repeat(file, len(table))
                yield place, table.append_column(STREAMED_FILE_COLUMN, column.cast(pyarrow.string()))

    return generate_tables


def _description(files: Sequence[str | Path]) -> str:
    """Return what `stream_files` reads: names, sizes and states of files, or addresses with commits."""
    described: list[Any] = []
    for file in files:
        if isinstance(file, Path):
            of_disk = file.stat()
            state = [str(file.resolve()), of_disk.st_ino, of_disk.st_mtime_ns, of_disk.st_ctime_ns]
            described.append([file.name, of_disk.st_size, *state])
        else:
            described.append(file)
    return json.dumps(described)


def stream_files(rows: "IterableDataset") -> tuple[str, str]:
    """Return an identity of files by names and sizes, or addresses; and one that any write changes."""
    sources = [json.loads(source) for source in rows.info.description.split("\n\n") if source]
    names = [json.dumps([file[:2] if isinstance(file, list) else file for file in source]) for source in sources]
    return "\n\n".join(dict.fromkeys(names)), json.dumps(sources)


@contextlib.contextmanager
def convert_read_errors(beginning: str, remedy: str = "", fetched: str | None = None) -> Iterator[None]:
    """Turn errors of `datasets` in the context into a one-line `RequestError` with beginning and end.

    Where a connection broke it is a `DownloadError`, in which `fetched` names the source.
    """
    try:
        yield
    except Exception as error:
        broken = as_download_error(error, fetched)
        if broken is error:
            raise
        if broken is not None:
            raise broken from error
        cause, reason = _cause(error)
        if isinstance(cause, UnicodeDecodeError):
            remedy = save_as_utf8(cause)
        raise RequestError(f"{beginning}, which cannot be read: {reason}{remedy}") from error


def _read_declared(
    key: str, source: str, path: Path, split: str | None, name: str | None, columns: Sequence[str] | None
) -> Any:
    """Return the rows of a Hub dataset, or of files that a folder's card names; print unread ones."""
    import datasets

    from midus_hf.data.readers import with_own_reader

    is_folder = path.exists()
    subject = f"{key} is {source!r}"
    if not is_folder and not Path(datasets.config.HF_DATASETS_CACHE, source.replace("/", "___")).exists():
        check_hub_id(key, source, "dataset")  # without an answer, `datasets` retries for half a minute
    with convert_read_errors(subject), fetching(source):
        declared = datasets.load_dataset_builder(str(path.resolve()) if is_folder else source, name)
        files = declared.config.data_files
        splits = {each: [Path(file).resolve() for file in files[each]] for each in files} if is_folder else {}
    text: Mapping[str, Any] | None = None if columns is None else {}
    if is_folder:
        read = [file for of_split in splits.values() for file in of_split]
        refuse_pointers(key, read)
        _note_unread_files(key, path, _files_of(key, path), read)
        files = _data_files(splits)
        text = _READER_OPTIONS["text"]
    with convert_read_errors(subject), fetching(source):
        builder = with_own_reader(declared, files, text)
        if columns is not None:
            return _streamed_rows(builder, key, split, columns)
        builder.download_and_prepare()
        return builder.as_dataset(split=split)


def refuse_pointers(key: str, files: Sequence[Path]) -> None:
    """Refuse files that are only pointers to others."""
    pointers = [file for file in files if is_lfs_pointer(file)]
    if pointers:
        others = f", as {len(pointers) - 1:,} others are" if pointers[1:] else ""
        raise RequestError(
            f"{key} has the file {str(pointers[0])!r}, which is a Git LFS pointer, not the file{others}; run git lfs pull there."
        )


def _read_files(
    key: str, path: Path, split: str | None, text_column: str | None, columns: Sequence[str] | None, names_files: bool
) -> Any:
    """Return the rows of a file, or of a folder's files; name the one that cannot be read."""
    from midus_hf.data.readers import READERS, VERSION

    kind, splits, files = _select_files(key, path, has_text=text_column is not None)
    read = [file for of_split in splits.values() for file in of_split]
    refuse_pointers(key, read)
    _note_unread_files(key, path, files, read)

    def prepared(files: Mapping[str, Sequence[Path]]) -> Any:
        reader = "csv" if kind == "tsv" else kind
        options = _READER_OPTIONS.get(kind, {})
        builder = READERS[reader](dataset_name=reader, hash=VERSION, data_files=_data_files(files), **options)
        if columns is None:
            builder.download_and_prepare()
        return builder

    remedy = ". Repair the file, or remove it."
    try:
        with convert_read_errors(f"{key} is {str(path)!r}", remedy):
            builder = prepared(splits)
    except RequestError as error:
        if path.is_dir():  # the error of `datasets` does not say which file it is about
            for file in read:
                with convert_read_errors(f"{key} has the file {str(file)!r}", remedy):
                    prepared({"train": [file]})
        if len(read) == 1:
            raise
        raise RequestError(
            f"{key} is {str(path)!r}, whose {len(read):,} files can be read one by one, but not together: {_cause(error)[1]}. "
            "Expected the same columns in all, each of one type. Name one file, or give all rows the same columns."
        ) from error
    with convert_read_errors(f"{key} is {str(path)!r}"):
        rows = builder.as_dataset(split=split) if columns is None else _streamed_rows(builder, key, split, columns)
    if kind != "text":
        return rows
    if columns is not None:
        return rows if text_column == "text" else rows.rename_column("text", text_column)
    texts = builder.as_dataset(split="train")
    for file, text in zip(read, texts["text"], strict=False):
        if "\0" in text:  # zero bytes are valid UTF-8, but not text
            raise RequestError(f"{key} has the file {str(file)!r}, which is not text: it has zero bytes. Remove it.")
    if names_files and path.is_dir() and text_column != _FILE_COLUMN:
        rows = rows["train"].add_column(_FILE_COLUMN, [file.relative_to(path).as_posix() for file in read])
    return rows if text_column in (None, "text") else rows.rename_column("text", text_column)


def _select_files(key: str, path: Path, *, has_text: bool) -> tuple[str, dict[str, list[Path]], list[Path]]:
    """Return the kind of files read, these by split, and all files; `has_text`: whether text has rows."""
    files = _files_of(key, path)
    kind_of = {file: _kind_of(file) or ("text" if file == path else None) for file in files if file.is_file()}
    kinds = [kind for kind, _ in Counter(kind_of.values()).most_common() if kind is not None]
    kind = next((kind for kind in kinds if kind != "text"), "text")
    if not kinds or (kind == "text" and not has_text):
        endings = ", ".join(ending for ending, kind in KINDS.items() if has_text or kind != "text")
        content = "text" if has_text else "rows"
        raise RequestError(f"{key} is {str(path)!r}, which has no {content}; expected files ending in {endings}.")
    read = [file for file, its_kind in kind_of.items() if its_kind == kind and file.stat().st_size]
    if not read:
        expected = "text with a visible character" if has_text else "row"
        raise RequestError(f"{key} is {str(path)!r}, which is empty: it has no {expected}. Add text to it.")
    return kind, {"train": read} if kind == "text" or path.is_file() else _by_split(key, path, read), files


def _data_files(splits: Mapping[Any, Sequence[Path]]) -> Any:
    """Return the files of each split for `datasets`, with their state on disk, which identifies its cache."""
    from datasets.data_files import DataFilesDict, DataFilesList

    lists = {}
    for split, files in splits.items():
        states = [(f"{at.st_size} {at.st_ino} {at.st_mtime_ns} {at.st_ctime_ns}",) for at in map(Path.stat, files)]
        lists[split] = DataFilesList([str(file.resolve()) for file in files], [*states])
    return DataFilesDict(lists)


def _files_of(key: str, path: Path) -> list[Path]:
    """Return a file, or a folder's sorted files without hidden ones; links to folders are not followed."""
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_symlink() or not file.is_dir())
        files = [file for file in files if not any(part[0] == "." for part in file.relative_to(path).parts)]
    with convert_read_errors(f"{key} is {str(path)!r}"):
        for file in files:
            file.stat()  # `datasets` would skip a broken link
    return files


def _by_split(key: str, folder: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Return files by the splits that `datasets` finds in names; others are `train` if no file is."""
    from datasets.data_files import DataFilesDict, get_data_patterns

    base = str(folder.resolve())
    with convert_read_errors(f"{key} is {str(folder)!r}"):
        patterns = DataFilesDict.from_patterns(get_data_patterns(base), base_path=base)
    names = {str(split): {Path(name).resolve() for name in matched} for split, matched in patterns.items()}
    splits = {split: [file for file in files if file.resolve() in matched] for split, matched in names.items()}
    splits = {split: of_kind for split, of_kind in splits.items() if of_kind}
    others = [file for file in files if not any(file in of_kind for of_kind in splits.values())]
    return splits if "train" in splits or not others else {"train": others, **splits}


def _note_unread_files(key: str, path: Path, files: Sequence[Path], read: Sequence[Path]) -> None:
    named = {file.resolve() for file in read}
    others = [file for file in files if file.resolve() not in named]
    endings_of = {file: "".join(file.suffixes[-2:]) or file.name for file in others}
    unread = Counter("linked folder" if file.is_dir() else endings_of[file] for file in others)
    if unread:
        endings = first_few([f"{count:,} {ending}" for ending, count in unread.most_common()], 5)
        print_note(
            f"{key} {str(path)!r}: {len(files) - unread.total():,} of {len(files):,} files are read; not read: {endings}"
        )

"""Rows of chats, read from JSON, JSON lines or Parquet files, a folder of these files, or a dataset on the Hub."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from midus_hf.documents import DocumentError, endings, json_line_rows, parquet_rows, read_text, walk_files
from midus_hf.files.json_text import parse_json
from midus_hf.sft.options import SftConfig
from midus_hf.training.data.corpus import load_hub_dataset

# Endings of files that hold rows. All but `.parquet` may be followed by the ending of a compression.
ENDINGS = (".jsonl", ".json", ".parquet")


def iterate_rows(config: SftConfig) -> Iterator[tuple[str, Any]]:
    """Return an iterator over the rows of the data, each with its location, for messages.

    Args:
        config: Options of the run; only the keys that begin with `dataset_` are read.

    Raises:
        DocumentError: If `dataset_name` names no data, a folder has no files of rows, or a file cannot be read.
    """
    path = Path(config.dataset_name).expanduser()
    if not path.exists() and not _holds_rows(path):
        rows = load_hub_dataset("dataset_name", config.dataset_name, config.dataset_config, config.dataset_train_split)
        return ((f"row {number} of {config.dataset_name!r}", row) for number, row in enumerate(rows, start=1))
    if config.dataset_config is not None:
        raise DocumentError(
            f"dataset_name is {config.dataset_name!r}, which is local; dataset_config is for datasets of the Hub."
        )
    return (row for file in _find_files(path) for row in _read_file(file, config.dataset_encoding))


def _find_files(path: Path) -> list[Path]:
    if not path.exists():
        raise DocumentError(
            f"dataset_name is {str(path)!r}, which does not exist; expected a file, a folder or a dataset id."
        )
    if path.is_file():
        if not _holds_rows(path):
            raise DocumentError(f"dataset_name is {str(path)!r}; expected a file ending in {', '.join(ENDINGS)}.")
        return [path]
    files = [file for file in walk_files(path) if _holds_rows(file) and not file.is_dir()]
    if not files:
        raise DocumentError(
            f"dataset_name is {str(path)!r}, a folder without rows; expected files ending in {', '.join(ENDINGS)}."
        )
    return files


def _holds_rows(path: Path) -> bool:
    suffix, compression = endings(path)
    return suffix in ENDINGS and not (compression and suffix == ".parquet")


def _read_file(path: Path, encoding: str) -> Iterator[tuple[str, Any]]:
    suffix, compression = endings(path)
    if suffix == ".parquet":
        return parquet_rows(path)
    # Published corpora name JSON lines .json.gz. A plain .json file is one list if it begins with a bracket.
    if suffix == ".jsonl" or compression:
        return json_line_rows(path, encoding)
    text = read_text(path, encoding)
    return _rows_of_list(path, text) if text.lstrip().startswith("[") else json_line_rows(path, encoding)


def _rows_of_list(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    try:
        rows = parse_json(text)
    except ValueError as error:
        raise DocumentError(f"file {str(path)!r} is not JSON: {error}. Expected a list of objects.") from error
    return ((f"row {number} of {str(path)!r}", row) for number, row in enumerate(rows, start=1))

"""Readers for `datasets` that keep text: its own read "2004-01-25" as a date and `007` as a number."""

import csv
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
from datasets.builder import Key
from datasets.exceptions import DatasetGenerationError
from datasets.features.features import register_feature
from datasets.packaged_modules.csv.csv import Csv
from datasets.packaged_modules.json.json import Json
from datasets.packaged_modules.parquet.parquet import Parquet
from datasets.packaged_modules.text.text import Text
from datasets.table import array_cast, table_cast
from pyarrow.parquet import ParquetFile

from midus_hf.config.errors import RequestError
from midus_hf.files.checkpoint_files import parse_json

# Change this with any change of the readers: cached rows of `datasets` are then not reused.
VERSION = "midus-4"

_CHARACTERS_AT_ONCE = 10 << 20
_ROWS_AT_ONCE = 10_000
_ROWS_OF_STREAM = 1000
_LONGEST_FIELD = 2**31 - 1  # characters
_LINES_OF_A_FIELD = 3  # more lines, each of which would be a row, are rows that a quote swallows


@dataclass
class JsonText(datasets.Json):
    """Feature for values of any type, stored as JSON."""

    _type: str = field(default="JsonText", init=False, repr=False)

    def encode_example(self, example_data: Any) -> str | None:
        return None if example_data is None else json.dumps(example_data, ensure_ascii=False)

    def decode_example(self, example_data: str | None, token_per_repo_id: Any = None) -> Any:
        return None if example_data is None else json.loads(example_data)

    def cast_storage(self, storage: pa.Array) -> pa.Array:
        return storage if isinstance(storage, pa.JsonArray) else array_cast(storage, self.pa_type)


with warnings.catch_warnings():
    # `datasets` says so of its function on each import, whoever calls it.
    warnings.filterwarnings("ignore", "'register_feature' is experimental", UserWarning)
    register_feature(JsonText, "JsonText")


class _OtherColumnsError(Exception):
    """Rows have columns, or values that are not text, which earlier rows lack."""


class JsonReader(Json):
    """Reader of JSON lines, and of lists of objects or texts."""

    _is_text: dict[str, bool]
    _is_stream = False

    def take(self, columns: Sequence[str]) -> None:
        self._is_stream = True
        self._set_types({name: number == 0 for number, name in enumerate(columns)})

    def _set_types(self, is_text: dict[str, bool]) -> None:
        self._is_text = is_text
        self.info.features = datasets.Features(
            {name: datasets.Value("string") if is_text else JsonText() for name, is_text in is_text.items()}
        )

    def _download_and_prepare(self, *args: Any, **kwargs: Any) -> None:
        self._is_text = {}
        while True:
            self._set_types(self._is_text)
            try:
                return super()._download_and_prepare(*args, **kwargs)
            except DatasetGenerationError as error:
                if not isinstance(error.__cause__, _OtherColumnsError):
                    raise

    def _generate_tables(self, files_iterables: Any, **others: Any) -> Iterator[tuple[Key, pa.Table]]:
        for shard, files in enumerate(files_iterables):
            batches = (rows for file in files for rows in self._rows(file))
            earlier_rows = 0
            for number, rows in enumerate(batches):
                yield Key(shard, number), self._table(rows, earlier_rows)
                earlier_rows += len(rows)
        if not self._is_text:
            raise RequestError("it has no rows")

    def _table(self, rows: list[dict[str, Any]], earlier_rows: int) -> pa.Table:
        """Return rows as a table: columns with only texts as text, all others as JSON."""
        names = self._is_text if self._is_stream else dict.fromkeys(chain.from_iterable(rows))
        columns = {name: [row.get(name) for row in rows] for name in names}
        before = dict(self._is_text)
        for name, values in columns.items():
            self._is_text[name] = before.get(name, True) and set(map(type, values)) <= {str, NoneType}
        if self._is_text != before:
            if self._is_stream:
                name = next(iter(before))
                numbered = enumerate(columns[name], start=earlier_rows + 1)
                number, value = next((at, value) for at, value in numbered if not isinstance(value, str | None))
                raise RequestError(f"row {number} has {value!r:.60} under {name!r}; expected text")
            raise _OtherColumnsError
        arrays = []
        for name, is_text in self._is_text.items():
            values = columns.get(name, [None] * len(rows))
            texts = pa.array(values if is_text else map(JsonText().encode_example, values), pa.string())
            arrays.append(texts if is_text else JsonText().cast_storage(texts))
        return pa.Table.from_arrays(arrays, names=list(self._is_text))

    def _rows(self, file: str) -> Iterator[list[dict[str, Any]]]:
        encoding = "utf-8-sig" if self.config.encoding == "utf-8" else self.config.encoding
        # `datasets` makes this `open` read archives and addresses too.
        with open(file, encoding=encoding, errors=self.config.encoding_errors, newline="\n") as opened:
            begin = 1
            while lines := opened.readlines(_CHARACTERS_AT_ONCE):
                first = next(filter(None, map(str.strip, lines)), "")
                if begin == 1 and (self.config.field is not None or first.startswith("[")):
                    yield from self._listed("".join(lines) + opened.read())
                    return
                rows = [_row(line, number) for number, line in enumerate(lines, begin) if line.strip()]
                begin += len(lines)
                if rows:
                    yield rows

    def _listed(self, text: str) -> Iterator[list[dict[str, Any]]]:
        values = parse_json(text, unique_keys=True)
        if self.config.field is not None:
            values = values[self.config.field]
        rows = [{"text": value} if isinstance(value, str) else value for value in values]
        for number, row in enumerate(rows, start=1):
            if not isinstance(row, dict):
                raise RequestError(f"value {number} of its list is {row!r:.60}; expected an object or a text")
        for begin in range(0, len(rows), _ROWS_AT_ONCE):
            yield rows[begin : begin + _ROWS_AT_ONCE]


def _row(line: str, number: int) -> dict[str, Any]:
    row = None
    found = f"{line.strip()!r:.60}"
    try:
        row = parse_json(line, unique_keys=True)
        if "\\ud" in line.lower():
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"line {number} has an unpaired surrogate: {error}") from None
    except ValueError as error:
        where = f"{error.msg} at character {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        found = f"no JSON: {where}"
    if not isinstance(row, dict):
        raise RequestError(f"line {number} is {found}; expected an object in each line, or one list of objects")
    return row


class TableReader(Csv):
    """Reader of tables, whose columns are text."""

    def _generate_tables(self, files_iterables: Any, **others: Any) -> Iterator[tuple[Key, pa.Table]]:
        options = {**self.config.pd_read_csv_kwargs, "dtype": str, "keep_default_na": False, "iterator": True}
        for shard, file in ((shard, file) for shard, files in enumerate(files_iterables) for file in files):
            self._check_quotes(file)
            with pd.read_csv(file, **options) as frames:
                for number, frame in enumerate(frames):
                    if not isinstance(frame.index, pd.RangeIndex):
                        raise RequestError("its rows have more fields than its first line, which names the columns")
                    schema = pa.schema([(name, pa.string()) for name in frame.columns])
                    yield Key(shard, number), pa.Table.from_pandas(frame, schema, preserve_index=False)

    def _check_quotes(self, file: str) -> None:
        """Refuse quotes unclosed, closed within a field, or around lines: pandas would lose or split rows."""
        config = self.config
        if len(config.sep) > 1 or config.skiprows:  # longer separators are patterns
            return
        encoding = "utf-8-sig" if config.encoding in (None, "utf-8") else config.encoding
        names = ("quotechar", "quoting", "escapechar", "doublequote", "skipinitialspace")
        dialect: dict[str, Any] = {"delimiter": config.sep, **{name: getattr(config, name) for name in names}}
        literal = {**dialect, "quoting": csv.QUOTE_NONE}
        begin = 1
        columns = 0
        taken = []
        opened_in = None
        longest = csv.field_size_limit(_LONGEST_FIELD)
        with open(file, encoding=encoding, errors=config.encoding_errors, newline="") as opened:
            lines = (taken.append(line) or line for line in opened)  # type: ignore[func-returns-value]
            rows = csv.reader(lines, strict=True, **dialect)
            try:
                for row in rows:
                    columns = columns or len(row)
                    if len(taken) > _LINES_OF_A_FIELD and columns > 1:
                        if all(len(fields) == columns for fields in csv.reader(taken, **literal)):
                            raise csv.Error("each of these lines would be a row")
                    if config.quoting == csv.QUOTE_NONE and row:
                        if opened_in is not None and len(row) < columns:
                            begin = opened_in
                            raise csv.Error("a field of a TSV file ends with its line")
                        opens = any(field[:1] == '"' and (field == '"' or field[-1] != '"') for field in row)
                        opened_in = begin if opens else None
                    begin = rows.line_num + 1
                    taken.clear()
            except csv.Error as error:
                raise RequestError(
                    f"a quote in lines {begin} to {rows.line_num} takes more than its field ({error}); expected a field with "
                    'quotes to stand in quotes and to have each of them twice, as in "a ""low"" one"'
                ) from None
            finally:
                csv.field_size_limit(longest)


class ParquetReader(Parquet):
    """Parquet reader that streams columns in this thread.

    That of `datasets` keeps what it has read of a file, and its threads abort a process that ends early.
    """

    _columns: Sequence[str] | None = None

    def take(self, columns: Sequence[str]) -> None:
        self._columns = columns

    def _generate_tables(self, files: Any, row_groups_list: Any = ()) -> Iterator[tuple[Key, pa.Table]]:
        if self._columns is None:
            yield from super()._generate_tables(files, row_groups_list)
            return
        schema = pa.schema([each for each in self.info.features.arrow_schema if each.name in self._columns])
        for shard, file in enumerate(files):
            with open(file, "rb") as opened:
                parquet = ParquetFile(opened, pre_buffer=False)
                columns = [name for name in self._columns if name in parquet.schema_arrow.names]
                batches = parquet.iter_batches(_ROWS_OF_STREAM, columns=columns, use_threads=False)
                for number, batch in enumerate(batches):
                    yield Key(shard, number), table_cast(pa.Table.from_batches([batch]).select(columns), schema)


READERS: dict[str, Any] = {"text": Text, "json": JsonReader, "csv": TableReader, "parquet": ParquetReader}


def with_own_reader(declared: Any, data_files: Any, text: Mapping[str, Any] | None = None) -> Any:
    """Return a builder of `datasets` with the reader of its kind; itself if it is of another kind."""
    kinds: dict[Any, str] = {Json: "json", Csv: "csv"}
    if text is not None:
        kinds |= {Text: "text", Parquet: "parquet"}
    kind = next((kind for base, kind in kinds.items() if isinstance(declared, base)), None)
    if kind is None:
        return declared
    config = declared.config
    inherited = ("name", "version", "data_dir", "data_files", "description", "features")
    settings = {each.name: getattr(config, each.name) for each in fields(config) if each.name not in inherited}
    names = [Path(name) for of_split in (config.data_files or {}).values() for name in of_split]
    if kind == "csv" and config.sep == "\t" and all(".tsv" in name.suffixes[-2:] for name in names):
        settings["quoting"] = csv.QUOTE_NONE  # as in every TSV file
    if kind == "text" and text is not None:
        settings |= text
    return READERS[kind](
        dataset_name=declared.dataset_name,
        config_name=config.name,
        config_id=declared.config_id if declared.repo_id else None,  # which makes it available offline
        repo_id=declared.repo_id,
        base_path=declared.base_path,
        hash=VERSION,
        data_files=data_files,
        **settings,
    )

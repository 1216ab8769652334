"""A text is read as what its files are, with the paths of its rows; what cannot be read, or is left out, is said in one line."""

import bz2
import gzip
import json
import lzma
import os
from pathlib import Path

import datasets
import pytest

from midus_hf.data.corpus import read_corpus, read_paths, read_rows

TEXTS = ["The first text.", 'A second, with "marks"\nand two lines.', "null"]


def lines(texts=TEXTS, **more) -> bytes:
    return "".join(json.dumps({"text": text, **more}) + "\n" for text in texts).encode()


TABLE = "\n".join(["text,id", *('"' + text.replace('"', '""') + f'",{n}' for n, text in enumerate(TEXTS))])
QUOTES = ["a", '"begins', "b", '"low" is', 'ends"', '"both"']
LONG = "word, " * 30_000


def write(folder, files):
    """Write files by their names, a path as a link to that file; return the folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            path.symlink_to(folder / content)
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(folder)


def card(*configurations: str) -> str:
    """The card of a dataset whose configurations `a`, `b` say these lines of themselves."""
    said = (f"- config_name: {name}\n  {words}\n" for name, words in zip("ab", configurations, strict=False))
    return f"---\nconfigs:\n{''.join(said)}---\nWords.\n"


def texts_of(corpus, **options):
    return read_corpus(str(corpus) if not isinstance(corpus, list) else corpus, **options)["text"][:]


NOTES = "Two lines,\nand a third.\n\n"
SPLITS = ["README.md", "data/train.jsonl", "data/validation.jsonl", "data/test.jsonl", "notes.txt"]
DOWNLOADED = {name: lines([name]) if name.endswith("l") else "a card" for name in SPLITS}
IN_TEN_THOUSAND = ["1"] * 10_050

OBJECTS = json.dumps([{"text": text} for text in TEXTS]).encode()
TSV = ("text\tid\n" + "".join(f"{text}\t{n}\n" for n, text in enumerate(QUOTES))).encode()
OF_TWO = "1 of 2 files are read; not read: 1"
# One file is read as it is, and several as their folder: files, the texts of their rows, or their rows, and the ends of lines on
# standard error.
READ = {
    **{name: ({name: content}, TEXTS) for name, content in {
        "lines.jsonl": lines(), "lines.ndjson": lines(), "lines.json": lines(), "lines.JSON.GZ": gzip.compress(lines()),
        "list.json": OBJECTS, "list.json.gz": gzip.compress(OBJECTS),
        "x.json.bz2": bz2.compress(lines()), "x.jsonl.xz": lzma.compress(lines()),
        "archives end to end.jsonl.gz": gzip.compress(lines(TEXTS[:1])) + gzip.compress(lines(TEXTS[1:])),
        "a mark first.jsonl": b"\xef\xbb\xbf" + lines(), "blank lines.jsonl": lines().replace(b"\n", b"\n\n"),
    }.items()},
    **{name: ({name: "\ufeff" + NOTES}, [NOTES]) for name in ("notes.txt", "notes.md", "notes")},
    "notes.txt.gz": ({"notes.txt.gz": gzip.compress(NOTES.encode())}, [NOTES]),
    # Columns of tables are text.
    "table.csv": ({"table.csv": TABLE}, [{"text": text, "id": str(n)} for n, text in enumerate(TEXTS)]),
    **{name: ({name: content}, [{"text": text, "id": str(n)} for n, text in enumerate(QUOTES)])
       for name, content in {"x.tsv": TSV, "x.TSV": TSV, "x.tsv.gz": gzip.compress(TSV)}.items()},
    "a card of a TSV file": ({"README.md": card("data_files: x.tsv\n  sep: \"\\t\""), "x.tsv": 'text\tid\n"low\t1\n"low" is\t2\n'},
                             ['"low', '"low" is'], f"{OF_TWO} .md"),
    "quotes in fields": ({"x.csv": 'text,id\n6" of rain,1\n"a ""low"" one","2"\n'}, ['6" of rain', 'a "low" one']),
    "a long field": ({"x.csv": f'text,id\n"{LONG}",1\n'}, [LONG]),
    "a field of lines that are no rows": ({"x.csv": 'text,id\n"a,\nb,\n\nc,d,e\nf",1\n'}, ["a,\nb,\n\nc,d,e\nf"]),
    "leading zeros": ({"x.csv": "text\n007\n1e3\n"}, ["007", "1e3"]),
    "words for nothing": ({"x.csv": "text,id\nNA,\nnull,nan\n"}, [{"text": "NA", "id": ""}, {"text": "null", "id": "nan"}]),
    "a number, then a word": ({"x.csv": "\n".join(["text", *IN_TEN_THOUSAND, "word"])}, [*IN_TEN_THOUSAND, "word"]),
    # A card declares files, and not how their values are read.
    "a card": ({"README.md": card("data_files: x.jsonl"), "x.jsonl": lines(["2004-01-25"], id=2**64)},
               [{"text": "2004-01-25", "id": 2**64}], f"{OF_TWO} .md"),
    "a card of a list": ({"README.md": card("data_files: x.json\n  field: rows"), "x.json": '{"rows": [{"text": "1", "id": 1.0}]}'},
                         [{"text": "1", "id": 1.0}], f"{OF_TWO} .md"),
    "a card of a table": ({"README.md": card("data_files: x.csv\n  sep: ;"), "x.csv": "text;id\n007;1\n"},
                          [{"text": "007", "id": "1"}], f"{OF_TWO} .md"),
    # Files of one kind are read.
    "one file of rows": ({"data.jsonl": lines(), **{f"{n}.txt": "a\nb\n" for n in "abc"}}, TEXTS, "not read: 3 .txt"),
    "a table": ({"data.csv": f"text\n{TEXTS[0]}\n", "notes.txt": "a\nb\n"}, TEXTS[:1], f"{OF_TWO} .txt"),
    "two kinds of rows": ({"a.tsv": "text\none\n", "b.tsv": "text\ntwo\n", "c.csv": "no"}, ["one", "two"], "not read: 1 .csv"),
    "notes named as a split": ({"data.jsonl": lines(), "notes-test.txt": "a\n"}, TEXTS, f"{OF_TWO} .txt"),
    "nothing in a file": ({"a.jsonl": lines(), "b.jsonl": ""}, TEXTS, f"{OF_TWO} .jsonl"),
    "many kinds": ({"a.txt": "a", **{f"{n}.{n}": "" for n in ("one", "two", "three", "four", "five", "six")}}, ["a"],
                   "1 of 7 files are read; not read: 1 .five, 1 .four, 1 .one, 1 .six, 1 .three and 1 more"),
    "a linked folder": ({"a.txt": "one", "linked.txt": Path()}, ["one"], f"{OF_TWO} linked folder"),
    "names that are patterns": ({"a[12].txt": "one", "a1.txt": "two"}, ["two", "one"]),
    # Files of the split that trains are read.
    "a downloaded dataset": (DOWNLOADED, ["data/train.jsonl"], "3 of 5 files are read; not read: 1 .md, 1 .txt",
                             "split 'train' is read, of train, validation, test"),
    "names with one of a split": ({name: lines([name]) for name in ("dev-blog.jsonl", "web.jsonl", "wiki.jsonl")},
                                      ["web.jsonl", "wiki.jsonl"], "split 'train' is read, of train, validation"),
}  # fmt: skip


@pytest.mark.parametrize("case", READ)
def test_files_are_read_with_their_notes(folder, case, capsys):
    files, expected, *said = READ[case]
    write(folder, files)
    for _ in range(1 + bool(said)):
        read = read_corpus(str(folder / [*files, ""][0] if len(files) == 1 else folder))
        assert (read["text"][:] if isinstance(expected[0], str) else list(read)) == expected
        printed = capsys.readouterr().err.splitlines()
        assert all(line.endswith(words) for line, words in zip(printed, said, strict=True))


def test_a_home_folder_can_be_abbreviated(folder, monkeypatch):
    monkeypatch.setenv("HOME", write(folder, {"a.txt": "words"}))
    assert texts_of("~/a.txt") == ["words"]


def test_a_split_and_a_slice_are_read_where_they_are_named(folder):
    write(folder, DOWNLOADED | {"rows/rows.jsonl": lines(list("abcdefghij"))})
    assert texts_of(folder / "rows" / "rows.jsonl", split="train[8:]") == ["i", "j"]
    assert texts_of(folder / "data", split="test") == ["data/test.jsonl"]


VALUES = {
    "dates": ["2004-01-25", "1937-05-27T10:00:00Z"],
    "a date and a text": ["2004-01-25", "red"],
    "texts that are JSON": ["4", "null", "[1]"],
    "text and a number": ["4", 3, None],
    "whole numbers and fractions": [3, 2.5, 1e22, 0.1 + 0.2, 1e-7],
    "numbers of more than 64 bits": [2**64, -(10**30), 1],
    "truth values": [True, False, None],
    "a null in an object": [{"a": None, "b": 1}, {"b": "2004-01-25"}, {}],
    "lists": [[1, 2], [0.5], [], [["2004-01-25"]]],
    "nothing": [None, None],
}


@pytest.mark.parametrize("ending", ["jsonl", "json"])
@pytest.mark.parametrize("case", VALUES)
def test_values_of_json_are_what_they_are(folder, case, ending, monkeypatch):
    """Also where the first rows would be of another type, and the row is read long after them."""
    monkeypatch.setattr("midus_hf.data.readers._CHARACTERS_AT_ONCE", 10)
    monkeypatch.setattr("midus_hf.data.readers._ROWS_AT_ONCE", 1)
    rows = [{"text": "words", "value": value} for value in VALUES[case]]
    written = json.dumps(rows) if ending == "json" else "".join(json.dumps(row) + "\n" for row in rows)
    read = read_corpus(write(folder, {f"x.{ending}": written}))
    assert repr(read["value"][:]) == repr(VALUES[case])


def test_a_column_that_begins_late_is_read(folder, monkeypatch):
    monkeypatch.setattr("midus_hf.data.readers._CHARACTERS_AT_ONCE", 10)
    write(folder, {"a.jsonl": lines(["one", "two"]) + lines(["three"], late=1), "b.jsonl": lines(["four"], other="x")})
    read = read_corpus(str(folder))
    assert read["text"][:] == ["one", "two", "three", "four"]
    assert read["late"][:] == [None, None, 1, None] and read["other"][:] == [None, None, None, "x"]


def test_rows_of_the_hub_are_read_as_those_of_files(folder, monkeypatch):
    write(folder, {"x.jsonl": lines(["2004-01-25"], id=2**64)})
    build = datasets.load_dataset_builder
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda source, name: build(str(folder), name))
    monkeypatch.setattr("midus_hf.data.corpus.check_hub_id", lambda *_: None)
    assert list(read_corpus("someone/dates")) == [{"text": "2004-01-25", "id": 2**64}]


REPLACED = {
    "x.txt": str.encode,
    "x.jsonl": lambda text: lines([text]),
    "x.csv": lambda text: f"text\n{text}\n".encode(),
    "x.jsonl.gz": lambda text: gzip.compress(lines([text]), mtime=0),
}


@pytest.mark.parametrize("name", REPLACED)
def test_replaced_file_of_same_size_and_time_is_reread(folder, name):
    for text in ("alpha", "omega", "alpha"):
        write(folder, {"new": REPLACED[name](text)})
        os.utime(folder / "new", (1_600_000_000,) * 2)
        (folder / "new").replace(folder / name)
        assert texts_of(folder / name) == [text]


@pytest.mark.parametrize("name", ["json", "csv", "text", "parquet"])
def test_a_folder_with_the_name_of_a_reader_is_that_folder(folder, name, monkeypatch):
    """`datasets` reads the current folder for such a name."""
    monkeypatch.chdir(folder)
    write(folder, {"beside.jsonl": lines(["beside"]), "beside.csv": "text\nbeside\n", "beside.txt": "beside"})
    with pytest.raises(ValueError, match="which does not exist; expected a file, a folder or a dataset id"):
        read_corpus(name)
    write(folder / name, {"README.md": card("data_files: x.jsonl"), "x.jsonl": lines(["inside"])})
    assert texts_of(name) == ["inside"]
    (folder / name / "README.md").unlink()
    assert texts_of(name) == ["inside"]


def test_dataset_card_declares_files_and_splits(folder, capsys):
    first = "data_files: [{split: train, path: one.jsonl}, {split: test, path: two.jsonl}]"
    described = card(first, "data_files: two.jsonl")
    write(folder, {"README.md": described, "one.jsonl": lines(["one"]), "two.jsonl": lines(["two"])})
    assert texts_of(folder, name="a") == ["one"]
    assert "split 'train' is read, of train, test" in capsys.readouterr().err
    assert texts_of(folder, name="b") == ["two"]
    with pytest.raises(ValueError, match=r"Config name is missing|configs|available"):
        read_corpus(str(folder))


def test_several_corpora_keep_order_and_matching_columns(folder, capsys):
    write(folder, {"b/two.txt": "two", "a.txt": "one", ".hidden/x.txt": "no", "c.pdf": "no"})
    others = folder.parent / "rows"
    write(others, {"x.jsonl": lines(["three", "  "], path=[1, 2]), "one.csv": "text\n1\n"})
    write(others, {"number.jsonl": lines(["a"], id=1), "file.jsonl": lines(["b"], file=3)})
    datasets.DatasetDict({"test": datasets.Dataset.from_dict({"text": ["a"]})}).save_to_disk(str(others / "splits"))
    assert texts_of(others / "splits", split="test") == ["a"]
    rows = read_corpus([str(folder), str(others / "x.jsonl")])
    assert rows["text"][:] == ["one", "two", "three"]
    assert read_corpus(str(folder))["file"][:] == ["a.txt", "b/two.txt"] and "file" not in rows.column_names
    assert rows["path"][:] == [None, None, [1, 2]]
    printed = capsys.readouterr().err
    assert "2 of 3 files are read; not read: 1 .pdf" in printed
    assert "1 of 4 texts are blank or missing, and are left out" in printed
    own = [str(folder), str(others / "file.jsonl")]  # which has a column called as that of texts
    assert texts_of(own) == ["one", "two", "b"]
    assert texts_of([str(others / "number.jsonl"), str(others / "one.csv")]) == ["a", "1"]


def test_lines_are_said_by_the_first_process_alone(folder, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    read_corpus(write(folder, {"a.txt": "one", "b.txt": " "}))
    assert "left out" not in capsys.readouterr().err


@pytest.mark.parametrize("is_terminal", [True, False])
def test_bars_are_for_terminals(folder, is_terminal, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    texts_of(write(folder, {"a.jsonl": lines()}))
    assert ("Generating train split" in capsys.readouterr().err) == is_terminal


def test_rows_without_text_are_read(folder):
    write(folder, {"README.md": "a card", "rows.jsonl": b'{"prompt": "a"}\n'})
    assert read_rows("dataset_name", str(folder)).column_names == ["prompt"]


def test_paths_are_read_with_the_one_tree_that_texts_name():
    paths = [[0, 1], [-1, -1], [2, 7]]
    rows = datasets.Dataset.from_dict({"text": ["words"] * 3, "path": paths})
    read = read_paths(rows, "path")
    assert read.paths.tolist() == paths and read.paths.dtype == "int64" and read.tree is None
    assert read_paths(rows.add_column("memory_tree", ["a" * 64] * 3), "path").tree == "a" * 64

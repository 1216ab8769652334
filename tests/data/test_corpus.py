"""A text is read as what its files are, with the paths of its rows; what cannot be read, or is left out, is said in one line."""

import bz2
import gzip
import json
import lzma
import os
from functools import partial
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from training.tiny_run import document, framing_tokenizer, refused, tiny_tokenizer

from midus_hf.data.corpus import read_corpus, read_paths, read_rows
from midus_hf.data.packing import checked_paths, packed_sequences
from midus_hf.data.stream import StreamedSequences
from midus_hf.memories.hierarchical.options import BankLayout, FetchedBlocks

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
    assert (read["late"][:], read["other"][:]) == ([None, None, 1, None], [None, None, None, "x"])


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
    assert read_corpus(str(folder))["file"][:] == ["a.txt", "b/two.txt"]
    assert "file" not in rows.column_names
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
    assert read.paths.tolist() == paths
    assert read.paths.dtype == "int64"
    assert read.tree is None
    assert read_paths(rows.add_column("memory_tree", ["a" * 64] * 3), "path").tree == "a" * 64


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "ab12" * 16 + "\nsize 17477929\n"
BANKS = {"hier-ffn": BankLayout("hier-ffn", (0,), FetchedBlocks(2, ({},) * 2))}
# Files, what is said of their folder, and what is read in its place, if anything.
FILES = {
    "half a pair": ({"x.jsonl": lines(["a"]) + b'{"text": "\\ud83d"}\n'}, r"cannot be read: line 2 has an unpaired surrogate"),
    "no JSON": ({"x.jsonl": lines(["a"]) + b"{text\n"}, "line 2 is no JSON: .* at character 2; .* Repair the file"),
    "no objects": ({"x.jsonl": b'"a"\n"b"\n'}, "line 1 is '\"a\"'; expected an object in each line"),
    "a key twice": ({"x.jsonl": b'{"text": "a", "text": "b"}\n'}, "line 1 is no JSON: it has the key 'text' 2 times"),
    "numbers in a list": ({"x.json": b'["a", 1]'}, "value 2 of its list is 1; expected an object"),
    "lines without rows": ({"x.jsonl": b" \n\n"}, "cannot be read: it has no rows"),
    "no column": ({"x.jsonl": b'{"content": "a", "id": 1}\n'}, "no column 'text', only content, id; set text_column"),
    "text and numbers": ({"x.jsonl": b'{"text": "a"}\n{"text": 3}\n'}, "has 3 in row 2, under 'text'; expected text"),
    "latin in a row": ({"x.jsonl": lines(["a"] * 2_000) + b'{"text": "\xff"}\n'}, "perhaps Windows-1252. .* iconv -f WINDOWS-1252"),
    "empty": ({"x.txt": ""}, "is empty: it has no text"),
    "blank": ({"x.jsonl": lines([" ", "\n"])}, "is empty: it has no text"),
    "no rows": ({"x.jsonl": ""}, "is empty: it has no text"),
    "an empty folder": ({"x.pdf": "a"}, r"has no text; expected files ending in \.txt"),
    "latin": ({"x.txt": "a \u00fc".encode("latin-1")}, "cannot be read: 'utf-8' codec can't decode byte 0xfc"),
    **{f"UTF-16 in {name}": ({name: text.encode("utf-16")}, "it is UTF-16. .* iconv -f UTF-16 -t UTF-8")
       for name, text in {"x.tsv": "text\tid\na\t1\n", "x.txt": "words"}.items()},
    "fields without a column": ({"x.csv": "text,id\na,1,2\nb,3,4\n"}, "its rows have more fields than its first line"),
    "a quote in a field": ({"x.csv": 'id,text\n1,a\n2,"fast, it\n3,b\n4,"low" is\n'}, "a quote in lines 3 to 5 takes more"),
    "a quote never closed": ({"x.csv": 'id,text\n1,a\n2,"fast\n3,b\n'}, "a quote in lines 3 to 4 takes more"),
    "a quote over rows": ({"x.csv": 'id,text\n1,"fast\n2,b\n3,c\n4,6"\n'}, "lines 2 to 5 takes more .*each of these lines"),
    "a quote over lines of a TSV": ({"x.tsv": 'id\ttext\n1\t"a\n\nb"\n2\tc\n'}, "lines 2 to 4 takes more .*a field of a TSV"),
    "other separators": ({"x.csv": "sep=;\nid;text\n1;a\n"}, "no column 'text', only sep=;; .* save it with commas"),
    "zero bytes": ({"a.txt": "a", "x.txt": b"a\0b"}, "x.txt', which is not text: it has zero bytes. Remove it"),
    "no Parquet": ({"a.parquet": b"PAR1"}, "a.parquet', which cannot be read"),
    "a cut archive": ({"a.jsonl": lines(), "x.jsonl.gz": gzip.compress(lines())[:-9]}, "x.jsonl.gz', .* Compressed file ended"),
    "no common columns": ({"a.csv": "text\none\n", "b.csv": "text,x\ntwo,1\n"}, "whose 2 files .* not together: .* Name one file"),
    "a broken link": ({"a.jsonl": lines(), "link.jsonl": Path("absent")}, "which cannot be read: "),
    "a pattern in a file": ({"x::y.jsonl": lines()}, "in a path as a pattern. Rename", "x::y.jsonl"),
    "a pattern in a folder": ({"shard[12]/a.jsonl": lines()}, "in a path as a pattern. Rename", "shard[12]"),
    "pointers": ({"real.txt": "a", **{f"{n}.txt": POINTER for n in range(12)}}, "0.txt', .* Git LFS pointer, .* as 11 others are"),
    **{f"a pointer, {name}": ({name: POINTER}, f"{name}', .* Git LFS pointer, not the file; run git lfs pull", name)
       for name in ("x.txt", "x.parquet")},
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_unreadable_files_are_refused_in_one_line(folder, case):
    files, message, *named = FILES[case]
    write(folder, files)
    with refused(message) as refusal:
        read_corpus(str(folder.joinpath(*named)))
    assert "\n" not in str(refusal.value)


ABSENT, EMPTY = "which does not exist; expected a file, a folder or", "is empty; expected"
ABSENCES = [("", EMPTY), ([], EMPTY), *((path, ABSENT) for path in ("absent/corpus.jsonl", "../absent", "a/b/c"))]


@pytest.mark.parametrize(
    ("corpus", "message"), [*ABSENCES, ("someone/mistyped", "no file or folder here, and the Hub cannot")]
)
def test_absent_corpus_is_refused_without_a_network(corpus, message):
    with refused(message):
        read_corpus(corpus)


def saved(folder, rows, splits=()):
    data = datasets.Dataset.from_dict(rows)
    (datasets.DatasetDict(dict.fromkeys(splits, data)) if splits else data).save_to_disk(str(folder))
    return str(folder)


def parquet_of(folder, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "x.parquet")
    return str(folder / "x.parquet")


TEXT = pyarrow.array(["one", None, "two"])
OF_ARROW = {"large": TEXT.cast("large_string"), "view": TEXT.cast("string_view"), "repeated": TEXT.dictionary_encode()}


@pytest.mark.parametrize("kind", OF_ARROW)
def test_text_of_every_type_of_arrow_is_read(folder, kind):
    path = parquet_of(folder, text=OF_ARROW[kind], n=[1, 2, 3])
    rows = read_corpus(path)
    assert (rows["text"], rows["n"]) == (["one", "two"], [1, 3])
    assert [row["text"] for row in read_rows("corpus", path, columns=["text"])] == ["one", None, "two"]


@pytest.mark.parametrize("kind", ["binary", "large_binary", "binary_view"])
def test_bytes_of_arrow_are_refused(folder, kind):
    with refused(f"has {kind} under 'text'; expected text"):
        read_corpus(parquet_of(folder, text=pyarrow.array([b"one"], kind)))


def broken_text(folder):
    return parquet_of(
        folder, text=pyarrow.array([b"a"] * 2_000 + [b"\xff"]).view("string")
    )  # which Arrow does not check


def of_pointer(folder):
    saved(folder / "saved", {"text": ["a"]})
    next((folder / "saved").glob("*.arrow")).write_text(POINTER)
    return str(folder / "saved")


def streamed(corpus, rank=0, world_size=1, columns=("text",), **options):
    texts = read_rows("corpus", corpus, columns=columns)
    options = {"documents_apart": False, "shuffle_buffer": 0, "rank": rank, "world_size": world_size, **options}
    return StreamedSequences(texts, tiny_tokenizer(), 16, **options)


def streamed_paths(corpus):
    options = {"read_paths": partial(checked_paths, banks=BANKS, path_column="path"), "path_column": "path"}
    return list(zip(range(9), streamed(corpus, columns=("text", "path", "memory_tree"), **options), strict=False))


def with_paths(paths, **columns):
    return datasets.Dataset.from_dict({"text": ["words"] * len(paths), "path": paths, **columns})


def packed(text, length, tokenizer=None, **options):
    rows = datasets.Dataset.from_dict({"text": [text]})
    return packed_sequences(rows, tokenizer or tiny_tokenizer(), length, documents_apart=False, **options)


def without_eos():
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    return tokenizer


SEVERAL, TEXT = [document(3 + 7 * number % 40, number) for number in range(23)], lines(["w3"])
ROWS = "".join(
    json.dumps({"text": document(9, 1), "path": [0, 1], "memory_tree": tree * 64}) + "\n" for tree in "aaab"
)
FRAME = framing_tokenizer("<bos> <pad> $A")


def checked(path):
    """Check six rows of one path; None for a model without a bank."""
    return checked_paths(with_paths([path or [1, 2]] * 6), BANKS if path else {}, "path")


# Files, what is done with their folder, and what is said.
REQUESTS = [
    ({}, lambda at: read_corpus(saved(at / "x", {"text": ["a"]}, ["train", "test"]), split="dev"), "train, test, and not 'dev'"),
    ({}, lambda at: read_corpus(saved(at / "x", {"text": ["a"]}), split="test"), "has no splits, but 'test' was given; leave"),
    ({}, lambda at: read_corpus(saved(at / "x", {"text": ["a"]}), name="en"), "no configurations, but 'en' was given; leave"),
    ({"a.txt": "a"}, lambda at: read_corpus(str(at), name="en"), "no configurations, but 'en' was given; leave"),
    ({"x.jsonl": TEXT}, lambda at: read_corpus(str(at / "x.jsonl"), name="en"), "no configurations, but 'en' was given; leave"),
    ({"a/train.jsonl": TEXT}, lambda at: read_corpus(str(at), split="dev"), r'Unknown split "dev"\. Should be one of'),
    ({}, lambda at: read_corpus(of_pointer(at)), "is a Git LFS pointer, not the file; run git lfs pull"),
    ({"a.jsonl": lines(["a"], id=1), "b.csv": "text,id\nb,1\n"}, lambda at: read_corpus([str(at / "a.jsonl"), str(at / "b.csv")]),
     "columns that differ in type from file to file"),
    ({}, lambda at: read_corpus(broken_text(at)), r"a row of corpus '.*x\.parquet' is not text in UTF-8: .* invalid start byte"),
    ({"README.md": "a"}, lambda at: read_rows("rows", str(at / "README.md")), r"has no rows; expected files ending in \.jsonl"),
    *(({}, lambda at, tree=tree: read_paths(with_paths([[0, 1]] * 2, memory_tree=["a" * 64, tree]), "path"), "paths of one tree")
      for tree in ("b" * 64, None)),
    ({}, lambda at: read_paths(with_paths([[0, 1]]), "leaf", "text 'a.txt'"), r"^text 'a\.txt' has no column 'leaf'"),
    *(({}, lambda at, path=path: read_paths(with_paths([[0, 1], path, [2, 7]]), "path"), "row 2 of the corpus, .* under 'path'")
      for path in (None, [], [1, -1], [1, 2, 3], [-2, 1])),
    *(({}, lambda at, path=path: checked(path), message) for path, message in (
        (None, "path_column is 'path', but the model has no memory"),
        ([0, 0, 0], r"column 'path' .* is \(6, 3\), torch.int64; expected integers"),
        ([1, 4], "has 4 for level 2 in row 0; expected 0 to 3"),
        ([2, 0], "has 2 for level 1 in row 0; expected 0 to 1"),
        ([1, 1], "no child of node 1; expected 2 to 3"),
    )),
    ({}, lambda at: packed("w5", 1000), "has 2 tokens; expected at least one sequence of 1,000"),
    ({}, lambda at: packed("w5 w6 w7", 4, vocab_size=6), "embeds"),
    ({}, lambda at: packed("w5", 4, without_eos()), "tokenizer has no EOS token"),
    ({}, lambda at: packed("w5 w6 w7", 2, FRAME), "sequence_length is 2, and the tokenizer puts 2 tokens"),
    # Streams.
    ({"x.jsonl": '{"body": "w4"}\n'}, lambda at: streamed(str(at)), "begins with 1 texts of '.*/x.jsonl' that are blank .* set"),
    ({"x.jsonl": '{"text": "w4"}\n{"text": 7}\n'}, lambda at: streamed(str(at)), "'.*/x.jsonl', .*: row 2 has 7 under 'text'"),
    ({"x.jsonl": '{"text": "w4"}\nw5\n'}, lambda at: streamed(str(at)), r"'.*/x.jsonl', .*: line 2 is no JSON.* Repair"),
    ({"x.csv": "body\nw4\n"}, lambda at: streamed(str(at)), "corpus has no column 'text', only body; set text_column"),
    ({}, lambda at: streamed(parquet_of(at, text=[7])), "after 0 texts, in '.*/x.parquet', has 7 under 'text'; expected text"),
    ({}, lambda at: streamed(parquet_of(at, text=["a"]), columns=["body"]), "corpus '.*' has no column 'body', only text; set"),
    ({"x.jsonl": ROWS}, lambda at: streamed_paths(str(at / "x.jsonl")), "after 3 texts, has paths of another tree"),
    *((files, lambda at: streamed(str(at), 1, 2), f"corpus of rank 1 .{message}") for files, message in (
        ({"a.jsonl": lines(SEVERAL), "b.jsonl": lines(SEVERAL[:1])}, r"1 of 2 files\) has 4 tokens; expected"),
        ({"a.jsonl": lines(SEVERAL[:1])}, r"1 text in 2\) has 0 tokens; expected"),
        ({"a.jsonl": lines(SEVERAL), "b.jsonl": lines([" "])}, r"1 of 2 files\) begins with 1 texts of '.*/b.jsonl' that are blank"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("files", "call", "message"), REQUESTS, ids=[row[2] for row in REQUESTS])
def test_wrong_requests_are_refused(files, call, message, folder, monkeypatch):
    monkeypatch.setattr("midus_hf.data.stream._TEXTS_AT_ONCE", 3)
    write(folder, files)
    with refused(message):
        call(folder)


@pytest.mark.parametrize("key", ["text", "corpus"])
def test_absent_package_is_named_with_what_to_run(folder, key, without):
    write(folder, {"a.txt": "a"})
    without("datasets")
    with refused(rf"^{key} .*txt' needs the package datasets, .*; run: pip install datasets$"):
        read_corpus(str(folder / "a.txt"), key=key)

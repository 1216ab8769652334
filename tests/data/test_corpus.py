"""A text is read as what its files are, with the paths of its rows; what cannot be read, or is left out, is said in one line."""

import bz2
import gzip
import json
import lzma
import os
from pathlib import Path

import pytest

datasets = pytest.importorskip("datasets")

from midus_hf.data.corpus import read_corpus, read_paths, read_rows  # noqa: E402

TEXTS = ["The first text.", 'A second, with "marks"\nand two lines.', "null"]


def lines(texts=TEXTS, **more) -> bytes:
    return "".join(json.dumps({"text": text, **more}) + "\n" for text in texts).encode()


TABLE = "\n".join(["text,id", *('"' + text.replace('"', '""') + f'",{n}' for n, text in enumerate(TEXTS))])
QUOTES = ["a", '"begins', "b", '"low" is', 'ends"', '"both"']
LONG = "word, " * 30_000


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "data"
    path.mkdir()
    return path


def write(folder, files):
    """Write files by their names, of which what is a path becomes a link to that file; return the folder."""
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

# Files, of which one alone is read as it is and several as their folder; the texts of their rows, or their rows; and lines on
# standard error, each told by its end.
READ = {
    **{
        name: ({name: content}, TEXTS)
        for name, content in {
            "lines.jsonl": lines(), "lines.JSONL": lines(), "lines.ndjson": lines(), "lines.json": lines(),
            "list.json": json.dumps([{"text": text} for text in TEXTS]), "lines.jsonl.gz": gzip.compress(lines()),
            "list.json.gz": gzip.compress(json.dumps([{"text": text} for text in TEXTS]).encode()),
            "lines.json.bz2": bz2.compress(lines()), "lines.jsonl.xz": lzma.compress(lines()),
            "lines.JSON.GZ": gzip.compress(lines()),
            "archives end to end.jsonl.gz": gzip.compress(lines(TEXTS[:1])) + gzip.compress(lines(TEXTS[1:])),
            "a mark first.jsonl": b"\xef\xbb\xbf" + lines(), "blank lines.jsonl": lines().replace(b"\n", b"\n\n"),
        }.items()
    },
    **{name: ({name: "\ufeff" + NOTES}, [NOTES]) for name in ("notes.txt", "notes.md", "notes")},
    "notes.txt.gz": ({"notes.txt.gz": gzip.compress(NOTES.encode())}, [NOTES]),
    # Columns of tables are text.
    "table.csv": (
        {"table.csv": TABLE}, [{"text": text, "id": str(n)} for n, text in enumerate(TEXTS)],
    ),
    **{
        name: (
            {name: compress(("text\tid\n" + "".join(f"{text}\t{n}\n" for n, text in enumerate(QUOTES))).encode())},
            [{"text": text, "id": str(n)} for n, text in enumerate(QUOTES)],
        )
        for name, compress in {"x.tsv": bytes, "x.TSV": bytes, "x.tsv.gz": gzip.compress}.items()
    },
    "a card of a TSV file": (
        {"README.md": card("data_files: x.tsv\n  sep: \"\\t\""), "x.tsv": 'text\tid\n"low\t1\n"low" is\t2\n'}, ['"low', '"low" is'],
        "1 of 2 files are read; not read: 1 .md",
    ),
    "quotes in fields": ({"x.csv": 'text,id\n6" of rain,1\n"a ""low"" one","2"\n'}, ['6" of rain', 'a "low" one']),
    "a long field": ({"x.csv": f'text,id\n"{LONG}",1\n'}, [LONG]),
    "a field of lines that are no rows": (
        {"x.csv": 'text,id\n"a,\nb,\n\nc,d,e\nf",1\n'}, ["a,\nb,\n\nc,d,e\nf"],
    ),
    "leading zeros": ({"x.csv": "text\n007\n1e3\n"}, ["007", "1e3"]),
    "words for nothing": ({"x.csv": "text,id\nNA,\nnull,nan\n"}, [{"text": "NA", "id": ""}, {"text": "null", "id": "nan"}]),
    "a number, then a word": ({"x.csv": "\n".join(["text", *IN_TEN_THOUSAND, "word"])}, [*IN_TEN_THOUSAND, "word"]),
    # A card declares files, and not how their values are read.
    "a card": (
        {"README.md": card("data_files: x.jsonl"), "x.jsonl": lines(["2004-01-25"], id=2**64)},
        [{"text": "2004-01-25", "id": 2**64}], "1 of 2 files are read; not read: 1 .md",
    ),
    "a card of a list": (
        {"README.md": card("data_files: x.json\n  field: rows"), "x.json": '{"rows": [{"text": "1", "id": 1.0}]}'},
        [{"text": "1", "id": 1.0}], "1 of 2 files are read; not read: 1 .md",
    ),
    "a card of a table": (
        {"README.md": card("data_files: x.csv\n  sep: ;"), "x.csv": "text;id\n007;1\n"}, [{"text": "007", "id": "1"}],
        "1 of 2 files are read; not read: 1 .md",
    ),
    # Files of one kind are read.
    "one file of rows": (
        {"data.jsonl": lines(), **{f"{n}.txt": "a\nb\n" for n in "abc"}}, TEXTS, "1 of 4 files are read; not read: 3 .txt",
    ),
    "a table": ({"data.csv": f"text\n{TEXTS[0]}\n", "notes.txt": "a\nb\n"}, TEXTS[:1], "1 of 2 files are read; not read: 1 .txt"),
    "two kinds of rows": (
        {"a.tsv": "text\none\n", "b.tsv": "text\ntwo\n", "c.csv": "no"}, ["one", "two"],
        "2 of 3 files are read; not read: 1 .csv",
    ),
    "notes named as a split": (
        {"data.jsonl": lines(), "notes-test.txt": "a\n"}, TEXTS, "1 of 2 files are read; not read: 1 .txt",
    ),
    "nothing in a file": ({"a.jsonl": lines(), "b.jsonl": ""}, TEXTS, "1 of 2 files are read; not read: 1 .jsonl"),
    "many kinds": (
        {"a.txt": "a", **{f"{name}.{name}": "" for name in ("one", "two", "three", "four", "five", "six")}}, ["a"],
        "1 of 7 files are read; not read: 1 .five, 1 .four, 1 .one, 1 .six, 1 .three and 1 more",
    ),
    "a linked folder": ({"a.txt": "one", "linked.txt": Path()}, ["one"], "1 of 2 files are read; not read: 1 linked folder"),
    "names that are patterns": ({"a[12].txt": "one", "a1.txt": "two"}, ["two", "one"]),
    # Files of the split that trains are read.
    "a downloaded dataset": (
        DOWNLOADED, ["data/train.jsonl"], "3 of 5 files are read; not read: 1 .md, 1 .txt",
        "split 'train' is read, of train, validation, test",
    ),
    "names of which one is a split": (
        {name: lines([name]) for name in ("dev-blog.jsonl", "web.jsonl", "wiki.jsonl")}, ["web.jsonl", "wiki.jsonl"],
        "split 'train' is read, of train, validation",
    ),
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
    with pytest.raises(ValueError, match=r'Unknown split "dev"\. Should be one of'):
        read_corpus(str(folder / "data"), split="dev")


VALUES = {
    "dates": ["2004-01-25", "1937-05-27T10:00:00Z"],
    "a date beside a text": ["2004-01-25", "red"],
    "texts that are JSON": ["4", "null", "[1]"],
    "text beside a number": ["4", 3, None],
    "whole numbers beside fractions": [3, 2.5, 1e22, 0.1 + 0.2, 1e-7],
    "numbers of more than 64 bits": [2**64, -(10**30), 1],
    "truth values": [True, False, None],
    "a null in an object": [{"a": None, "b": 1}, {"b": "2004-01-25"}, {}],
    "lists": [[1, 2], [0.5], [], [["2004-01-25"]]],
    "nothing": [None, None],
}


@pytest.mark.parametrize("ending", ["jsonl", "json"])
@pytest.mark.parametrize("case", VALUES)
def test_values_of_json_are_what_they_are(folder, case, ending, monkeypatch):
    """Also where the first rows alone would be of another type, and the row is read long after them."""
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
    """A folder stands for the dataset of the Hub."""
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


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "ab12" * 16 + "\nsize 17477929\n"


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


def test_saved_dataset_is_read_without_splits_it_lacks(folder):
    rows = datasets.Dataset.from_dict({"text": ["a"]})
    rows.save_to_disk(str(folder / "saved"))
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(folder / "splits"))
    write(folder, {"texts/a.txt": "a", "rows.jsonl": lines()})
    assert texts_of(folder / "splits", split="test") == ["a"]
    without_names = "which has no configurations, but 'en' was given; leave the name"
    for source, options, message in (
        ("splits", {"split": "dev"}, "has the splits train, test, and not 'dev'; name one of them"),
        ("saved", {"split": "test"}, "saved', which has no splits, but 'test' was given; leave it out"),
        *((source, {"name": "en"}, without_names) for source in ("saved", "texts", "rows.jsonl")),
    ):
        with pytest.raises(ValueError, match=message):
            read_corpus(str(folder / source), **options)
    next((folder / "saved").glob("*.arrow")).write_text(POINTER)
    with pytest.raises(ValueError, match="which is a Git LFS pointer, not the file; run git lfs pull"):
        read_corpus(str(folder / "saved"))


def test_several_corpora_keep_order_and_matching_columns(folder, capsys):
    write(folder, {"b/two.txt": "two", "a.txt": "one", ".hidden/x.txt": "no", "c.pdf": "no"})
    others = folder.parent / "rows"
    write(others, {"x.jsonl": lines(["three", "  "], path=[1, 2]), "one.csv": "text\n1\n"})
    write(
        others, {"two.csv": "text,id\nb,1\n", "number.jsonl": lines(["a"], id=1), "file.jsonl": lines(["b"], file=3)}
    )
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
    with pytest.raises(ValueError, match="columns that differ in type from file to file"):
        read_corpus([str(others / "number.jsonl"), str(others / "two.csv")])


def test_lines_are_said_by_the_first_process_alone(folder, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    read_corpus(write(folder, {"a.txt": "one", "b.txt": " "}))
    assert "left out" not in capsys.readouterr().err


# Files, what is said of their folder, and what is read in its place, if anything.
REFUSALS = {
    "half a pair": (
        {"x.jsonl": lines(["a"]) + b'{"text": "\\ud83d"}\n'},
        r"x.jsonl', which cannot be read: line 2 has half a character: 'utf-8' codec can't encode character '\ud83d' in position",
    ),
    "no JSON": (
        {"x.jsonl": lines(["a"]) + b"{text\n"},
        "x.jsonl', which cannot be read: line 2 is no JSON: Expecting property name enclosed in double quotes at character 2; "
        "expected an object in each line, or one list of objects. Repair the file",
    ),
    "no objects": (
        {"x.jsonl": b'"a"\n"b"\n'},
        "x.jsonl', which cannot be read: line 1 is '\"a\"'; expected an object in each line, or one list of objects. Repair",
    ),
    "a key twice": (
        {"x.jsonl": b'{"text": "a", "text": "b"}\n'},
        "line 1 is no JSON: it has the key 'text' 2 times; expected an object in each line",
    ),
    "numbers in a list": ({"x.json": b'["a", 1]'}, "value 2 of its list is 1; expected an object or a text. Repair"),
    "lines without rows": ({"x.jsonl": b" \n\n"}, "x.jsonl', which cannot be read: it has no rows. Repair the file"),
    "no column": ({"x.jsonl": b'{"content": "a", "id": 1}\n'}, "no column 'text', only content, id; set text_column"),
    "text and numbers": ({"x.jsonl": b'{"text": "a"}\n{"text": 3}\n'}, "has 3 in row 2, under 'text'; expected text"),
    "latin in a row": (
        {"x.jsonl": lines(["a"] * 2_000) + b'{"text": "\xff"}\n'},
        "invalid start byte; it is not UTF-8, perhaps Windows-1252. Save it as UTF-8, or run: iconv -f WINDOWS-1252",
    ),
    "empty": ({"x.txt": ""}, "is empty: it has no text with a visible character"),
    "blank": ({"x.jsonl": lines([" ", "\n"])}, "is empty: it has no text with a visible character"),
    "an empty folder": ({"x.pdf": "a"}, "which has no text; expected files ending in .txt, .md, .jsonl"),
    "latin": ({"x.txt": "a \u00fc".encode("latin-1")}, "x.txt', which cannot be read: 'utf-8' codec can't decode byte 0xfc"),
    **{
        f"UTF-16 in {name}": (
            {name: text.encode("utf-16")}, "it is UTF-16. Save it as UTF-8, or run: iconv -f UTF-16 -t UTF-8 FILE > NEW",
        )
        for name, text in {"x.tsv": "text\tid\na\t1\n", "x.txt": "words"}.items()
    },
    "fields without a column": (
        {"x.csv": "text,id\na,1,2\nb,3,4\n"},
        "x.csv', which cannot be read: its rows have more fields than its first line, which names the columns. Repair the file",
    ),
    **{
        f"a quote, {case}": ({"x.csv": text}, f"x.csv', which cannot be read: a quote in lines {said} ... expected a field with")
        for case, text, said in (
            ("text behind", 'id,text\n1,a\n2,"fast, it\n3,b\n4,"low" is\n', "3 to 5 takes more than its field ("),
            ("never closed", 'id,text\n1,a\n2,"fast\n3,b\n', "3 to 4 takes more than its field ("),
            ("over rows", 'id,text\n1,"fast\n2,b\n3,c\n4,6"\n', "2 to 5 takes more than its field (each of these lines"),
        )
    },
    "a quote over lines of a TSV": (
        {"x.tsv": 'id\ttext\n1\t"a\n\nb"\n2\tc\n'},
        "x.tsv', which cannot be read: a quote in lines 2 to 4 takes more than its field (a field of a TSV file ends",
    ),
    "other separators": (
        {"x.csv": "sep=;\nid;text\n1;a\n"},
        "has no column 'text', only sep=;; its fields may be separated otherwise: save it with commas, or as JSON lines.",
    ),
    "no rows": ({"x.jsonl": ""}, "which is empty: it has no text with a visible character. Add text to it"),
    "zero bytes": ({"a.txt": "a", "x.txt": b"a\0b"}, "x.txt', which is not text: it has zero bytes. Remove it"),
    "no Parquet": ({"a.parquet": b"PAR1"}, "a.parquet', which cannot be read"),
    "a cut archive": (
        {"a.jsonl": lines(), "x.jsonl.gz": gzip.compress(lines())[:-9]},
        "x.jsonl.gz', which cannot be read: Compressed file ended before",
    ),
    "files that do not go together": (
        {"a.csv": "text\none\n", "b.csv": "text,x\ntwo,1\n"},
        "whose 2 files can be read one by one, but not together: ... Name one file, or give all rows the same columns.",
    ),
    "a broken link": ({"a.jsonl": lines(), "link.jsonl": Path("absent")}, "which cannot be read: "),
    **{
        f"a pattern, {name}": ({name if "." in name else f"{name}/a.jsonl": lines()}, "in a path as a pattern. Rename", name)
        for name in ("x::y.jsonl", "shard[12]")
    },
    "pointers": (
        {"real.txt": "words", **{f"{number}.txt": POINTER for number in range(12)}},
        "0.txt', which is a Git LFS pointer, not the file, as 11 others are; run",
    ),
    **{
        f"a pointer, {name}": (
            {name: POINTER}, f"{name}', which is a Git LFS pointer, not the file; run git lfs pull there.", name,
        )
        for name in ("x.txt", "x.parquet")
    },
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_unreadable_files_are_refused_in_one_line(folder, case):
    files, message, *named = REFUSALS[case]
    write(folder, files)
    with pytest.raises(ValueError) as refusal:
        read_corpus(str(folder.joinpath(*named)))
    said = str(refusal.value)
    assert "\n" not in said and all(words in said for words in message.split(" ... ")), said


OF_THE_HUB = r"no file or folder here, and the Hub cannot be reached .* expected a file, a folder or a dataset"


@pytest.mark.parametrize("corpus", ["", [], "absent/corpus.jsonl", "../absent", "a/b/c", "someone/mistyped-corpus"])
def test_absent_corpus_is_refused_without_a_network(corpus):
    absent = r"which does not exist; expected a file, a folder or|is empty; expected"
    with pytest.raises(ValueError, match=OF_THE_HUB if "mistyped" in corpus else absent):
        read_corpus(corpus)


def test_a_row_that_is_no_text_is_named(folder):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = arrow.array([b"a"] * 2_000 + [b"\xff"]).view("string")  # which Arrow does not check
    parquet.write_table(arrow.table({"text": texts}), folder / "x.parquet")
    message = r"a row of corpus '.*x\.parquet' is not text in UTF-8: .* invalid start byte"
    with pytest.raises(ValueError, match=message):
        read_corpus(str(folder / "x.parquet"))


@pytest.mark.parametrize("key", ["text", "corpus"])
def test_a_package_that_is_not_there_is_named_with_what_to_run(folder, key, without):
    write(folder, {"a.txt": "a"})
    without("datasets")
    with pytest.raises(ValueError, match=rf"^{key} .*txt' needs the package datasets, .*; run: pip install datasets$"):
        read_corpus(str(folder / "a.txt"), key=key)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_bars_are_for_terminals(folder, is_terminal, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    texts_of(write(folder, {"a.jsonl": lines()}))
    assert ("Generating train split" in capsys.readouterr().err) == is_terminal


def test_rows_without_text_need_files_of_rows(folder):
    write(folder, {"README.md": "a card", "rows.jsonl": b'{"prompt": "a"}\n'})
    assert read_rows("dataset_name", str(folder)).column_names == ["prompt"]
    with pytest.raises(ValueError, match=r"README.md', which has no rows; expected files ending in .jsonl"):
        read_rows("dataset_name", str(folder / "README.md"))


def rows_with(paths, **columns):
    return datasets.Dataset.from_dict({"text": ["words"] * len(paths), "path": paths, **columns})


def test_paths_are_read_with_the_one_tree_that_texts_name():
    paths = [[0, 1], [-1, -1], [2, 7]]
    read = read_paths(rows_with(paths), "path")
    assert read.paths.tolist() == paths and read.paths.dtype == "int64" and read.tree is None
    assert read_paths(rows_with(paths, memory_tree=["a" * 64] * 3), "path").tree == "a" * 64
    for other in ("b" * 64, None):
        with pytest.raises(ValueError, match=r"expected paths of one tree\. Assign all documents by the same tree"):
            read_paths(rows_with(paths, memory_tree=["a" * 64, "a" * 64, other]), "path")
    with pytest.raises(ValueError, match=r"^text 'a\.txt' has no column 'leaf', only text, path; set path_column"):
        read_paths(rows_with(paths), "leaf", "text 'a.txt'")


@pytest.mark.parametrize("path", [None, [], [1, -1], [1, 2, 3], [-2, 1]])
def test_a_row_without_a_path_is_refused(path):
    message = r"row 2 of the corpus, .* has .* under 'path'; expected the node at each level"
    with pytest.raises(ValueError, match=message):
        read_paths(rows_with([[0, 1], path, [2, 7]]), "path")

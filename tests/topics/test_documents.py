"""Documents are read from files and folders; what is no text is refused."""

import gzip
import json
import re

import pytest

from midus_hf.topics.documents import (
    DocumentError,
    describe_files,
    documents_of,
    find_files,
    has_column,
    read_documents,
)


def compress(path, data: bytes) -> None:
    """Write a file, compressed as its name says."""
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(data))
        return
    pyarrow = pytest.importorskip("pyarrow")
    with pyarrow.output_stream(str(path), compression="zstd") as stream:
        stream.write(data)


def test_a_text_file_is_one_document_whatever_its_ending(tmp_path):
    for name in ("a.txt", "b.md", "no_ending", "c.tex"):
        (tmp_path / name).write_bytes("one\r\n\ntwo ü\n".encode())
        assert read_documents(tmp_path / name) == ["one\r\n\ntwo ü\n"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfwords")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "more"}')
    assert read_documents(tmp_path) == ["words", "more"]


def test_json_lines_hold_a_document_a_line_in_the_named_column(tmp_path):
    rows = [{"text": "one", "body": "1"}, {"text": "two\u2028", "body": "2"}]
    lines = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    assert read_documents(tmp_path / "a.jsonl") == ["one", "two\u2028"]
    assert read_documents(tmp_path / "a.jsonl", column="body") == ["1", "2"]


@pytest.mark.parametrize("name", ["a.ndjson", "a.JSONL", "a.NDJSON.GZ", "a.JSON.gz"])
def test_other_names_of_json_lines_are_read_as_such(tmp_path, name):
    data = b'{"text": "one"}\n{"text": "two"}\n'
    (tmp_path / name).write_bytes(gzip.compress(data) if name.lower().endswith("gz") else data)
    assert read_documents(tmp_path / name) == read_documents(tmp_path) == ["one", "two"]


@pytest.mark.parametrize("name", ["a.json", "a.CSV", "b.v2.tsv", "a.csv.gz"])
def test_rows_of_other_kinds_are_refused_with_the_line_that_converts_them(tmp_path, name, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    data = {"a.json": '[{"text": "one"}]', "b.v2.tsv": "text\tn\none\t1\n"}.get(name, "text,n\none,1\n").encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    with pytest.raises(
        DocumentError, match="whose rows would be read as one text; expected text, JSON lines"
    ) as refused:
        read_documents(tmp_path / name)
    exec(str(refused.value).partition("Convert the file: ")[2].rstrip("."), {"datasets": datasets})
    assert read_documents(f"{name[0]}.parquet") == ["one"]


def test_parquet_holds_a_document_a_row(tmp_path):
    datasets = pytest.importorskip("datasets")
    path = str(tmp_path / "a.parquet")
    datasets.Dataset.from_dict({"text": ["one", "two"]}).to_parquet(path)
    assert read_documents(path) == ["one", "two"]
    with pytest.raises(DocumentError, match=r"has no 'body', only text; set column to the one that holds the text"):
        read_documents(path, column="body")


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_compressed_files_are_read_as_they_are(tmp_path, ending):
    rows = "".join(json.dumps({"text": f"row {index} ü"}, ensure_ascii=False) + "\n" for index in range(5_000))
    compress(tmp_path / f"a.txt{ending}", "one\r\ntwo ü".encode())
    compress(tmp_path / f"b.jsonl{ending}", rows.encode())
    compress(tmp_path / f"c.json{ending}", b'{"text": "as C4 has it"}\n')
    compress(tmp_path / f"d.tar{ending}", b"is not read")
    compress(tmp_path / f"e.parquet{ending}", b"is not read")
    read = read_documents(tmp_path)
    assert read == ["one\r\ntwo ü", *(f"row {index} ü" for index in range(5_000)), "as C4 has it"]
    assert read_documents(tmp_path / f"a.txt{ending}") == read[:1]


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_archives_laid_end_to_end_are_read_to_their_end(tmp_path, ending):
    """As parallel compressors write them."""
    for name in ("a", "b"):
        compress(tmp_path / f"{name}.txt{ending}", b"words ")
    both = tmp_path / f"both.txt{ending}"
    both.write_bytes((tmp_path / f"a.txt{ending}").read_bytes() + (tmp_path / f"b.txt{ending}").read_bytes())
    assert read_documents(both) == ["words words "]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@pytest.mark.parametrize(("ending", "kind"), [(".gz", "gzip"), (".zst", "zstd")])
@pytest.mark.parametrize("damage", ["cut", "foreign"])
def test_a_damaged_archive_is_named(tmp_path, name, ending, kind, damage):
    path = tmp_path / f"{name}{ending}"
    compress(path, b"".join(b'{"text": "%d"}\n' % (index * 7919) for index in range(9_000)))
    path.write_bytes(path.read_bytes()[:-2_000] if damage == "cut" else b"something else entirely")
    with pytest.raises(
        DocumentError,
        match=rf"{re.escape(path.name)}' is no whole {kind} archive: .+\. Fetch it or compress it again\.",
    ):
        read_documents(tmp_path)


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    for name in ("a.txt", "a.txt.gz"):
        (tmp_path / name).symlink_to(tmp_path / "absent")
        with pytest.raises(DocumentError, match=rf"file '.*{name}' cannot be read: .*No such file"):
            read_documents(tmp_path)
        (tmp_path / name).unlink()


def test_of_a_folder_it_is_told_what_was_not_read(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "linked.txt").symlink_to(tmp_path / "b")
    for name in ("a.txt", "b/c.jsonl.gz", "1.csv", "2.csv", "b/3.csv", "4.pdf", "README", ".hidden", "5.tar.gz"):
        (tmp_path / name).touch()
    assert describe_files(tmp_path) == (
        f"read 2 of 9 files of {tmp_path}; not read: 3 .csv, 1 .pdf, 1 .tar.gz, 1 without an ending, 1 linked folder "
        "(expected .txt, .md, .jsonl, .ndjson, .parquet)"
    )
    assert len(find_files(tmp_path)) == 2
    for name in ("6.doc", "7.doc", "8.xml"):
        (tmp_path / name).touch()
    assert "not read: 3 .csv, 2 .doc, 1 .pdf, 1 .tar.gz, 1 .xml, 2 with other endings (" in describe_files(tmp_path)


def test_of_a_file_or_of_nothing_there_is_nothing_to_tell(tmp_path):
    (tmp_path / "a.txt").write_text("words")
    assert describe_files(tmp_path / "a.txt") is describe_files(tmp_path / "absent") is None


def test_a_folder_is_read_recursively_in_order_and_skips_what_holds_no_text(tmp_path):
    (tmp_path / "b").mkdir()
    for name in ("b/2.txt", "c.md", "a.txt", "b/1.jsonl"):
        text = json.dumps({"text": name}) if name.endswith("jsonl") else name
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\x00")
    (tmp_path / "code.py").write_text("not text")
    (tmp_path / "blank.txt").write_text(" \n\t")
    (tmp_path / ".hidden.txt").write_text("hidden", encoding="utf-8")
    (tmp_path / ".versions").mkdir()
    (tmp_path / ".versions" / "old.txt").write_text("hidden too")
    assert read_documents(tmp_path) == ["a.txt", "b/1.jsonl", "b/2.txt", "c.md"]


def test_a_home_folder_can_be_abbreviated(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("words")
    assert read_documents("~/a.txt") == ["words"]


def test_files_are_read_only_as_far_as_documents_are_taken(tmp_path):
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\nno json\n')
    documents = (document.text for document in documents_of(tmp_path))
    assert [next(documents), next(documents)] == ["words", "one"]
    with pytest.raises(DocumentError, match=r"is not JSON"):
        next(documents)


def gzip_with_a_wrong_checksum() -> bytes:
    data = bytearray(gzip.compress(b"words " * 100, mtime=0))
    data[-8] ^= 0xFF
    return bytes(data)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (
            "a.txt",
            b"good\xff\xfe",
            r"is not text in UTF-8: .* at byte \d+\. Take it out, or convert it\.",
        ),
        (
            "a.txt",
            bytes(range(256)),
            r"is not text in UTF-8: .* at byte \d+\. Take it out, or convert it\.",
        ),
        ("a.txt", b"abc\0def", r"is not text in UTF-8: it has zero bytes\. Take it out"),
        ("a.txt", b"\n\n", r"' is empty: it has no document with a visible character"),
        (
            "a.jsonl",
            b'{"text": "one"}\n' * 10_000 + b'{"text": "\xff"}\n',
            r"a\.jsonl' is not text in UTF-8: invalid start byte after line \d+\.",
        ),
        ("a.parquet", b"not parquet", r"a\.parquet' is no readable Parquet: .*\. Write it again\."),
        ("a.txt.gz", gzip_with_a_wrong_checksum(), r"a\.txt\.gz' is no whole gzip archive: CRC check failed"),
        ("a.png", b"", r"a folder without text; expected files ending in \.txt, \.md, \.jsonl, \.ndjson, \.parquet\."),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DocumentError, match=message):
        read_documents(tmp_path)


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.zst"])
def test_without_the_package_datasets_files_say_how_to_install_it(tmp_path, without, name):
    without("datasets")
    (tmp_path / name).touch()
    with pytest.raises(
        DocumentError, match=rf"{name}' needs the package datasets; install it with pip install datasets"
    ):
        read_documents(tmp_path)


def test_a_path_that_is_none_is_refused(tmp_path):
    with pytest.raises(DocumentError, match=r"text is '.*absent', which does not exist; expected a file or a folder"):
        read_documents(tmp_path / "absent")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON: "),
        ("[" * 100_000, "is not JSON: it is nested too deeply"),
        ('{"body": "x"}', "has no 'text', only body; set column to the one that holds the text."),
        ("[1]", "has no 'text', a list; set column"),
        ('{"text": 3}', "has a int under 'text'; expected text."),
    ],
)
def test_a_json_line_without_a_document_is_named(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "x"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(DocumentError, match=r"line 2 of '.*a.jsonl' " + re.escape(message)):
        read_documents(tmp_path)


def test_rows_that_are_no_objects_have_no_columns(tmp_path):
    (tmp_path / "a.jsonl").write_text('5\n"the path of it"\n')
    assert not has_column(tmp_path / "a.jsonl", "path")
    (tmp_path / "b.jsonl").write_text('{"path": [0]}\n')
    assert has_column(tmp_path, "path")


def test_documents_are_numbered_without_blank_ones_and_say_where_they_are(tmp_path, corpus):
    documents = list(documents_of(corpus))
    assert [document.number for document in documents] == list(range(39)) and documents[0].file is None
    assert documents[2].row == {"text": documents[2].text} and documents[2].location.startswith("line 4 of ")
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "folder" / "deep" / "a.txt").write_text("text")
    (document,) = documents_of(tmp_path / "folder")
    assert (document.text, document.row, document.file) == ("text", None, "deep/a.txt")

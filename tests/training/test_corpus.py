"""Documents are read from files, folders and datasets; what is no text is refused."""

import json
import re
import sys

import pytest

from midus_hf.training import CorpusOptions
from midus_hf.training.corpus import CorpusError, open_corpus


def read(path, **options) -> list[str]:
    return list(open_corpus(CorpusOptions(path=str(path), **options))())


def test_a_text_file_is_one_document_whatever_its_ending(tmp_path):
    for name in ("a.txt", "b.md", "no_ending", "c.tex"):
        (tmp_path / name).write_text("one\n\ntwo", encoding="utf-8")
        assert read(tmp_path / name) == ["one\n\ntwo"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbftext")
    assert read(tmp_path / "a.txt") == ["text"]


def test_another_encoding_can_be_named(tmp_path):
    (tmp_path / "a.txt").write_bytes("café".encode("latin-1"))
    assert read(tmp_path / "a.txt", encoding="latin-1") == ["café"]


def test_json_lines_hold_a_document_a_line_in_the_named_column(tmp_path):
    rows = [{"text": "one", "body": "1"}, {"text": "two", "body": "2"}]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert read(tmp_path / "a.jsonl") == ["one", "two"]
    assert read(tmp_path / "a.jsonl", column="body") == ["1", "2"]


def test_parquet_holds_a_document_a_row(tmp_path):
    datasets = pytest.importorskip("datasets")
    path = str(tmp_path / "a.parquet")
    datasets.Dataset.from_dict({"text": ["one", "two"]}).to_parquet(path)
    assert read(path) == ["one", "two"]
    with pytest.raises(CorpusError, match=r"has no 'body', only text; set corpus.column"):
        read(path, column="body")


def test_what_is_no_parquet_is_refused(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "a.parquet").write_bytes(b"not parquet")
    with pytest.raises(CorpusError, match=r"is no readable Parquet: .* Write it again"):
        read(tmp_path / "a.parquet")


def test_a_folder_is_read_recursively_in_order_and_skips_what_holds_no_text(tmp_path):
    (tmp_path / "b").mkdir()
    for name in ("b/2.txt", "c.txt", "a.txt", "b/1.jsonl"):
        text = json.dumps({"text": name}) if name.endswith("jsonl") else name
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\x00")
    (tmp_path / ".hidden.txt").write_text("hidden", encoding="utf-8")
    assert read(tmp_path) == ["a.txt", "b/1.jsonl", "b/2.txt", "c.txt"]


def test_each_reading_starts_anew(tmp_path):
    (tmp_path / "a.txt").write_text("text", encoding="utf-8")
    documents = open_corpus(CorpusOptions(path=str(tmp_path)))
    assert list(documents()) == list(documents()) == ["text"]


def test_documents_without_a_visible_character_are_left_out(tmp_path):
    (tmp_path / "a.txt").write_text(" \n\t", encoding="utf-8")
    (tmp_path / "b.txt").write_text("b", encoding="utf-8")
    assert read(tmp_path) == ["b"]


def test_an_absent_path_is_refused(tmp_path):
    with pytest.raises(CorpusError, match=r"which does not exist; expected a file, a folder or a dataset id"):
        read(tmp_path / "absent")
    with pytest.raises(CorpusError, match=r"corpus is 'absent.txt', which does not exist"):
        read("absent.txt")


def test_a_folder_without_text_is_refused(tmp_path):
    with pytest.raises(
        CorpusError, match=r"a folder without text; expected files ending in .txt, .md, .jsonl, .parquet"
    ):
        read(tmp_path)


@pytest.mark.parametrize("data", [b"good\xff\xfe", bytes(range(256))])
def test_bytes_that_are_no_text_are_refused(tmp_path, data):
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(
        CorpusError, match=r"is not text in utf-8: .* at byte \d+. Take it out, convert it, or set corpus"
    ):
        read(tmp_path)


def test_zero_bytes_are_no_text_although_they_decode(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc\0def")
    with pytest.raises(CorpusError, match=r"is not text: it has zero bytes"):
        read(tmp_path)


def test_an_unknown_encoding_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("a", encoding="utf-8")
    with pytest.raises(CorpusError, match=r"corpus.encoding is 'utf-99', which Python does not know"):
        read(tmp_path, encoding="utf-99")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON: "),
        ('{"body": "x"}', "has no 'text', only body; set corpus.column to the one that holds the text."),
        ("[1]", "has no 'text', a list; set corpus.column"),
        ('{"text": 3}', "has a int under 'text'; expected text."),
    ],
)
def test_a_json_line_without_a_document_is_named(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "x"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(CorpusError, match=r"line 2 of '.*a.jsonl' " + re.escape(message)):
        read(tmp_path)


def test_options_of_datasets_are_refused_for_local_text(tmp_path):
    (tmp_path / "a.txt").write_text("a", encoding="utf-8")
    with pytest.raises(CorpusError, match=r"which is local; config and shuffle_buffer are for datasets"):
        read(tmp_path, config="x")


def test_a_dataset_is_read_by_id_split_and_column(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(path, config, split, streaming):
        asked.append((path, config, split, streaming))
        return datasets.Dataset.from_dict({"body": ["one", "two", "three"]}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    options = {"config": "small", "split": "test", "column": "body", "streaming": True}
    assert read("owner/name", **options) == ["one", "two", "three"]
    assert asked == [("owner/name", "small", "test", True)]
    shuffled = [list(open_corpus(CorpusOptions(path="o/n", shuffle_buffer=9, **options), seed=2)()) for _ in range(2)]
    assert shuffled[0] == shuffled[1] and sorted(shuffled[0]) == ["one", "three", "two"]


def test_a_dataset_that_cannot_be_had_is_refused(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load_dataset(*args, **kwargs):
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'owner/name' doesn't exist\nand more")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(CorpusError, match=r"not to be had as a dataset: Dataset 'owner/name' doesn't exist$"):
        read("owner/name")


def test_without_the_package_datasets_a_dataset_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        CorpusError, match=r"needs the package datasets; install it with pip install 'midus-hf\[train\]'"
    ):
        read("owner/name")

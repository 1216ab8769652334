"""A corpus is local text or a dataset of the Hub, and starts anew each time it is read."""

import sys

import pytest
from training.tiny_run import refused

from midus_hf.documents import DocumentError
from midus_hf.training.data.corpus import find_corpus
from midus_hf.training.options import CorpusOptions


def read(path, **options) -> list[str]:
    return list(find_corpus(CorpusOptions(path=str(path), **options)).documents())


def test_local_text_is_read_in_the_encoding_and_from_the_column_that_the_options_name(tmp_path):
    (tmp_path / "a.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "b.jsonl").write_bytes('{"text": "one", "body": "né"}'.encode("latin-1"))
    assert read(tmp_path, encoding="latin-1", column="body") == ["café", "né"]


def test_each_reading_starts_anew(tmp_path):
    (tmp_path / "a.txt").write_text("text", encoding="utf-8")
    documents = find_corpus(CorpusOptions(path=str(tmp_path))).documents
    assert list(documents()) == list(documents()) == ["text"]


def test_an_absent_path_is_refused(tmp_path):
    with refused(r"which does not exist; expected a file, a folder or a dataset id", DocumentError):
        read(tmp_path / "absent")
    with refused(r"corpus is 'absent.txt', which does not exist", DocumentError):
        read("absent.txt")


def test_a_folder_without_text_is_refused_before_anything_is_read(tmp_path):
    with refused(r"a folder without text", DocumentError):
        find_corpus(CorpusOptions(path=str(tmp_path)))


def test_rows_of_a_dataset_need_text_in_the_column(monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *args, **kwargs: [{"text": " "}, {"text": "a"}, {"body": "b"}]
    )
    documents = find_corpus(CorpusOptions(path="owner/name")).documents()
    assert next(documents) == "a"
    with refused(r"corpus 'owner/name' has no 'text', only body; set column", DocumentError):
        next(documents)


def test_options_of_datasets_are_refused_for_local_text(tmp_path):
    (tmp_path / "a.txt").write_text("a", encoding="utf-8")
    with refused(r"which is local; config and shuffle_buffer are for datasets", DocumentError):
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
    shuffled = [
        list(find_corpus(CorpusOptions(path="o/n", shuffle_buffer=9, **options), seed=2).documents()) for _ in range(2)
    ]
    assert shuffled[0] == shuffled[1] and sorted(shuffled[0]) == ["one", "three", "two"]


def test_a_dataset_that_cannot_be_had_is_refused(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load_dataset(*args, **kwargs):
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'owner/name' doesn't exist\nand more")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with refused(r"cannot be loaded as a dataset: Dataset 'owner/name' doesn't exist$", DocumentError):
        read("owner/name")


def test_without_the_package_datasets_a_dataset_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refused(
        r"corpus 'owner/name' needs the package datasets; install it with pip install datasets", DocumentError
    ):
        read("owner/name")

"""Windows are the text of their documents, cut where tokens begin."""

import gzip
import json
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from midus_hf.topics.corpus import Corpus, Document, cut_windows, load_fast_tokenizer, read_corpus
from midus_hf.topics.text_files import DocumentError


def texts_of(windows):
    found = {}
    for window in windows:
        found.setdefault(window.document.number, []).append(window.text)
        assert window.number == len(found[window.document.number]) - 1
    return found


def test_windows_have_so_many_tokens_and_the_last_has_the_rest(tokenizer):
    documents = [Document(0, "w1 w2  w3\nw4 w5 "), Document(1, "w6"), Document(2, "w1 w2")]
    windows = texts_of(cut_windows(documents, tokenizer, 2))
    assert windows == {0: ["w1 w2  ", "w3\nw4 ", "w5 "], 1: ["w6"], 2: ["w1 w2"]}
    assert all(len(tokenizer.tokenize(text)) <= 2 for of_document in windows.values() for text in of_document)


def test_more_documents_than_are_tokenised_at_a_time_come_in_order(tokenizer):
    documents = [Document(number, f"w{number % 60} w1 w2") for number in range(150)]
    windows = list(cut_windows(iter(documents), tokenizer, 2))
    assert [(window.document.number, window.number) for window in windows] == [
        (n, w) for n in range(150) for w in (0, 1)
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_no_character_is_lost_where_a_token_is_a_part_of_one(size):
    alphabet = {letter: index for index, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(alphabet, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    text = "naïve 東京 👩‍🚀 ok"
    windows = cut_windows([Document(0, text)], PreTrainedTokenizerFast(tokenizer_object=tokenizer), size)
    assert "".join("".join(window.text.split()) for window in windows) == "".join(text.split())


def test_a_corpus_is_numbered_without_its_blank_documents(corpus):
    documents = list(read_corpus(corpus))
    assert [document.number for document in documents] == list(range(39))
    assert [document.label for document in documents[:4]] == ["a", "b", "b", "a"]
    unlabelled = list(read_corpus(Corpus(corpus.path)))
    assert [document.text for document in unlabelled] == [document.text for document in documents]
    assert {document.label for document in unlabelled} == {None}


def test_labels_are_read_from_compressed_json_and_parquet_and_may_be_numbers(tmp_path):
    import pyarrow
    from pyarrow import parquet

    rows = [{"body": "one", "topic": 3}, {"body": "two", "topic": 4}]
    with gzip.open(tmp_path / "a.json.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "b.parquet")
    documents = list(read_corpus(Corpus(str(tmp_path), "body", "topic")))
    assert [(document.text, document.label) for document in documents] == [("one", "3"), ("two", "4")] * 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, r"line 1 of .* has nothing under 'label'; expected a label, a string or a whole number\."),
        ({"text": "x", "label": 0.5}, r"has a float under 'label'"),
        ({"label": "a"}, r"line 1 of .* has no 'text', only label; set column"),
    ],
)
def test_a_row_without_a_label_is_refused(tmp_path, row, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(DocumentError, match=message):
        list(read_corpus(Corpus(str(path), label_column="label")))


def test_plain_text_has_no_labels(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (document,) = read_corpus(Corpus(str(tmp_path)))
    assert document.text == "text" and document.row is None and document.file == "a.txt"
    with pytest.raises(
        DocumentError, match=r"is plain text, which has no column 'label' of labels; expected JSON lines"
    ):
        list(read_corpus(Corpus(str(tmp_path), label_column="label")))


def test_a_tokenizer_that_is_not_there_or_knows_no_places_is_refused(monkeypatch):
    with pytest.raises(
        ValueError, match=r"tokenizer is 'absent/one', which cannot be loaded: .* Expected the folder or"
    ):
        load_fast_tokenizer("absent/one")

    monkeypatch.setattr("midus_hf.topics.corpus.load_tokenizer", lambda name: SimpleNamespace(is_fast=False))
    with pytest.raises(
        ValueError, match=r"tokenizer is 'slow', which does not know the positions of its tokens .* fast"
    ):
        load_fast_tokenizer("slow")

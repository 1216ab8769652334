"""The document of a question is that whose embedding is nearest to it; documents are cut into passages at ends of lines."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from topics.tiny_bert import save_tiny_bert, tiny_tokenizer

from midus_hf.topics.embedding import TextEmbedder
from midus_hf.topics.nearest_documents import NearestDocuments, cut_into_passages

DOCUMENTS = [f"w{index} w{index + 2} w{index // 3}" for index in range(40)]
QUESTIONS = [f"w{index} w{index + 1}" for index in range(20)]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    return TextEmbedder(str(save_tiny_bert(tmp_path_factory.mktemp("bert") / "model")), batch_size=16)


def test_it_is_the_nearest_of_all(embedder, monkeypatch):
    monkeypatch.setattr("midus_hf.topics.nearest_documents._QUESTIONS_AT_A_TIME", 7)
    found = NearestDocuments(DOCUMENTS, embedder)(QUESTIONS)
    rows, asked = embedder.embed(DOCUMENTS), embedder.embed(QUESTIONS)
    distances = torch.cdist(asked.double(), rows.double())
    assert found == [DOCUMENTS[index] for index in distances.argmin(dim=1).tolist()]
    assert len(set(found)) > 5


def test_a_document_is_nearest_to_itself_and_of_equals_it_is_the_first(embedder):
    nearest = NearestDocuments([*DOCUMENTS, *DOCUMENTS], embedder)
    assert nearest(DOCUMENTS) == DOCUMENTS
    assert nearest._known == {document: index for index, document in enumerate(DOCUMENTS)}


def test_a_question_is_embedded_once(embedder, monkeypatch):
    nearest = NearestDocuments(DOCUMENTS, embedder)
    first = nearest(["w1 w2", "w5", "w1 w2"])
    monkeypatch.setattr(embedder, "embed", lambda texts: pytest.fail(f"{texts} are embedded again"))
    assert nearest(["w5", "w1 w2"]) == [first[1], first[0]] and first[0] == first[2]


def test_progress_counts_documents(embedder):
    told = []
    NearestDocuments(DOCUMENTS, embedder, told.append)
    assert sum(told) == len(DOCUMENTS) and len(told) == 3


def test_without_documents_there_is_nothing_to_find(embedder):
    with pytest.raises(ValueError, match=r"there are no documents; expected one or more\."):
        NearestDocuments([], embedder)


TOKENIZER = tiny_tokenizer()


def count(text: str) -> int:
    return len(TOKENIZER(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    "document, most, expected",
    [
        ("w1 w2\nw3\nw4 w5 w6\n", 3, ["w1 w2\nw3", "w4 w5 w6"]),
        ("w1 w2 w3 w4 w5\nw6\n", 2, ["w1 w2", "w3 w4", "w5\nw6"]),
        ("w1\n\n\nw2", 5, ["w1\n\n\nw2"]),
        ("\n \n", 5, []),
        ("", 5, []),
        ("w1 w2 w3 w4", 4, ["w1 w2 w3 w4"]),
    ],
    ids=["lines", "long-line", "whole", "blank", "empty", "just-as-long"],
)
def test_a_document_is_cut_at_ends_of_lines(document, most, expected):
    assert cut_into_passages([document], TOKENIZER, most) == expected


def test_no_passage_is_of_two_documents():
    assert cut_into_passages(["w1", "w2 w3", "w4"], TOKENIZER, 10) == ["w1", "w2 w3", "w4"]


LINES = st.lists(st.lists(st.sampled_from(["w1", "w22", "stranger", "w3,"]), max_size=6).map(" ".join), max_size=6)


@settings(max_examples=60, deadline=None)
@given(documents=st.lists(LINES.map("\n".join), max_size=3), most=st.integers(1, 5))
def test_passages_hold_every_word_in_order_and_no_more_tokens_than_allowed(documents, most):
    found = cut_into_passages(documents, TOKENIZER, most)
    assert all(passage == passage.strip() and 0 < count(passage) <= most for passage in found)
    words = [token for document in documents for token in TOKENIZER.tokenize(document)]
    assert [token for passage in found for token in TOKENIZER.tokenize(passage)] == words

"""The document of a question is that whose embedding is nearest to it."""

import pytest
import torch
from retrieval.tiny_bert import save_tiny_bert

from midus_hf.retrieval.embedding import TextEmbedder
from midus_hf.retrieval.nearest_documents import NearestDocuments

DOCUMENTS = [f"w{index} w{index + 2} w{index // 3}" for index in range(40)]
QUESTIONS = [f"w{index} w{index + 1}" for index in range(20)]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    return TextEmbedder(str(save_tiny_bert(tmp_path_factory.mktemp("bert") / "model")), batch_size=16)


def test_it_is_the_nearest_of_all(embedder, monkeypatch):
    monkeypatch.setattr("midus_hf.retrieval.nearest_documents._QUESTIONS_AT_A_TIME", 7)
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

"""Documents of a pipeline get the paths that `midus cluster assign` gives them."""

import json

import pytest

from midus_hf.topics.assigning import document_paths, rows_with_paths
from midus_hf.topics.corpus import read_corpus
from midus_hf.topics.memory_retriever import MemoryRetriever
from midus_hf.topics.tree import ClusterTree, TreeOrigin

pytest.importorskip("datatrove")

from datatrove.data import Document

from midus_hf.topics import datatrove_steps
from midus_hf.topics.datatrove_steps import AssignPaths


@pytest.mark.parametrize("at_a_time", [7, 256])
def test_documents_get_their_paths_in_their_order(built, corpus, tokenizer, monkeypatch, at_a_time):
    monkeypatch.setattr(datatrove_steps, "_DOCUMENTS", at_a_time)
    with open(corpus) as file:
        texts = [json.loads(line)["text"] for line in file]
    retriever, documents = MemoryRetriever.load(built), read_corpus(corpus)
    paths = document_paths(retriever, tokenizer, documents["text"], 5)
    expected = list(rows_with_paths(documents, paths, retriever.tree))
    step = AssignPaths(str(built))
    actual = list(step.run((Document(text, str(number), metadata={"kept": 1}) for number, text in enumerate(texts))))
    assert [document.text for document in actual] == texts
    assert "memory_ids" not in actual[2].metadata, "it is blank"
    with_path = [document.metadata for document in actual if "memory_ids" in document.metadata]
    names = ("memory_ids", "memory_tree", "windows")
    assert with_path == [{"kept": 1, **{name: row[name] for name in names}} for row in expected]
    assert {row["memory_tree"] for row in expected} == {ClusterTree.load(built).fingerprint}
    assert step.stats["with a path"].total == 39 and step.stats["blank"].total == 1


def test_a_tree_that_names_no_tokenizer_is_refused(built, bert, tmp_path):
    assert list(AssignPaths(str(built)).run([])) == [] and list(AssignPaths(str(built)).run(None)) == []
    ClusterTree(3, ClusterTree.load(built).centroids, TreeOrigin(embedding_model=bert)).save(tmp_path / "bare")
    message = r"does not say how windows are cut; expected a tree that 'midus cluster build'"
    with pytest.raises(ValueError, match=message):
        list(AssignPaths(str(tmp_path / "bare")).run([]))

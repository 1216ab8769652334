"""From a corpus to a tree and back to the paths of its documents, also in a pipeline of datatrove."""

import itertools
import json
import re
import shutil

import numpy as np
import pytest
from pairs import by_default
from tiny import json_rows
from topics.trees import random_tree

from midus_hf.cli.clusters import nodes_with_words
from midus_hf.config.errors import install_extra
from midus_hf.data.corpus import read_corpus
from midus_hf.topics import run
from midus_hf.topics import tree as tree_module
from midus_hf.topics.building import TreeOptions
from midus_hf.topics.document_paths import document_paths, rows_with_paths
from midus_hf.topics.memory_retriever import MemoryRetriever, TextEmbedder
from midus_hf.topics.run import open_build
from midus_hf.topics.tree import ClusterTree, TreeOrigin

# When a build that writes a tree is killed, and whether a tree is there already.
MOMENTS = list(itertools.product(("before the first", "between them"), (False, True)))


@pytest.fixture
def make(tree_of_corpus, tmp_path):
    return lambda output="tree", **changes: tree_of_corpus(tmp_path / output, **changes)


def test_tree_records_its_build_and_places_documents(built, corpus, tokenizer, embedder):
    tree, stored, leaves = open_build(built)
    origin, bert = tree.origin, embedder.name
    assert (origin.embedding_model, origin.embedding_fingerprint) == (bert, embedder.fingerprint)
    assert (origin.tokenizer, origin.window_tokens, origin.embedding_max_tokens, origin.seed) == (bert, 5, 24, 0)
    assert np.bincount(leaves, minlength=9).tolist() == tree.sizes[1].tolist()
    assert len(leaves) == len(stored.documents) == int(tree.sizes[0].sum())
    documents = read_corpus(corpus)
    paths = document_paths(MemoryRetriever.load(built), tokenizer, documents["text"], 5)
    rows = list(rows_with_paths(documents, paths, tree))
    assert [row["document"] for row in rows] == list(range(39))
    assert [path[-1] for row in rows for path in row["windows"]] == leaves.tolist()
    for row in rows:
        paths = [tuple(path) for path in row["windows"]]
        assert all(path[0] == path[1] // tree.branching for path in paths)
        assert tuple(row["memory_ids"]) == max(paths, key=lambda path: (paths.count(path), -paths.index(path)))


def test_two_runs_do_not_share_a_folder(make, monkeypatch):
    cluster = run.build_tree

    def during(*arguments):
        with pytest.raises(ValueError, match="is being written by another run"):
            make()
        return cluster(*arguments)

    monkeypatch.setattr(run, "build_tree", during)
    make()


def test_tree_is_replaced_only_on_request(built, make, monkeypatch, tmp_path):
    shutil.copytree(built, tmp_path / "tree")
    with pytest.raises(ValueError, match="holds a tree; pass --overwrite to replace it"):
        make()
    monkeypatch.setattr(TextEmbedder, "embed", None)
    tree = make(overwrite=True, options=TreeOptions(branching=2, levels=3, samples=50))
    assert ClusterTree.load(tmp_path / "tree").fingerprint == tree.fingerprint
    assert tree.branching == 2


@pytest.mark.parametrize(("moment", "overwrites"), by_default([("between them", True)], MOMENTS))
def test_killed_build_resumes_without_embedding(built, make, monkeypatch, moment, overwrites, tmp_path):
    if overwrites:
        make(options=TreeOptions(branching=3, levels=2, steps=4, samples=50, seed=1))
    atomic_write, written = tree_module.atomic_write, []

    def killed(path):
        written.append(path.name)
        if len(written) == 1 + (moment == "between them"):
            raise KeyboardInterrupt
        return atomic_write(path)

    monkeypatch.setattr(tree_module, "atomic_write", killed)
    with pytest.raises(KeyboardInterrupt):
        make(overwrite=overwrites)
    monkeypatch.undo()
    output = tmp_path / "tree"
    assert (output / "tree.safetensors").exists() == (overwrites or moment == "between them")
    assert not (output / "tree.json").exists()
    embed, texts = TextEmbedder.embed, []
    monkeypatch.setattr(
        TextEmbedder, "embed", lambda self, some, *rest: texts.append(some) or embed(self, some, *rest)
    )
    for again in (make(), make(overwrite=True)):
        assert again.fingerprint == ClusterTree.load(output).fingerprint
    assert all(len(some) < 5 for some in texts), "only held-out texts"
    for name in ("tree.json", "tree.safetensors", "windows/embeddings.npy", "windows/leaves.npy"):
        assert (output / name).read_bytes() == (built / name).read_bytes(), name


def test_unsuitable_output_is_refused(make, without, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"which is a file; expected a folder to make\. Choose another\."):
        make("file")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "tree.safetensors").write_text("mine")  # centroids that no build was at
    for output, overwrite in ((".", False), ("tree", False), ("tree", True)):
        with pytest.raises(ValueError, match=r"contains other files than those of a tree; expected a new folder\."):
            make(output, overwrite=overwrite)
    assert (tmp_path / "tree" / "tree.safetensors").read_text() == "mine"
    without("sklearn")
    with pytest.raises(ValueError, match=re.escape(f"needs scikit-learn; {install_extra('clusters')}.")):
        make("new")


@pytest.mark.parametrize("at_a_time", [7, 256])
def test_pipeline_documents_get_their_paths(built, corpus, tokenizer, monkeypatch, at_a_time):
    steps, data = pytest.importorskip("midus_hf.topics.datatrove_steps"), pytest.importorskip("datatrove.data")
    monkeypatch.setattr(steps, "_DOCUMENTS", at_a_time)
    texts = [row["text"] for row in json_rows(corpus)]
    retriever, documents = MemoryRetriever.load(built), read_corpus(corpus)
    paths = document_paths(retriever, tokenizer, documents["text"], 5)
    expected = list(rows_with_paths(documents, paths, retriever.tree))
    step = steps.AssignPaths(str(built))
    given = (data.Document(text, str(number), metadata={"kept": 1}) for number, text in enumerate(texts))
    actual = list(step.run(given))
    assert [document.text for document in actual] == texts
    assert "memory_ids" not in actual[2].metadata, "it is blank"
    with_path = [document.metadata for document in actual if "memory_ids" in document.metadata]
    names = ("memory_ids", "memory_tree", "windows")
    assert with_path == [{"kept": 1, **{name: row[name] for name in names}} for row in expected]
    assert {row["memory_tree"] for row in expected} == {ClusterTree.load(built).fingerprint}
    assert (step.stats["with a path"].total, step.stats["blank"].total) == (39, 1)


def test_pipeline_documents_get_paths_of_named_topics(bert, tmp_path):
    steps, data = pytest.importorskip("midus_hf.topics.datatrove_steps"), pytest.importorskip("datatrove.data")
    rows = [{"text": f"w{number} w{number + 3}", "topic": "ab"[number % 2]} for number in range(6)]
    corpus = tmp_path / "rows.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = tmp_path / "tree"
    run.build(str(corpus), embedding_model=bert, tokenizer=bert, output=tree, topic_columns=["topic"])

    def paths(*metadata):
        given = [data.Document("w0 w3" if each is not None else " ", "0", metadata=each or {}) for each in metadata]
        return [each.metadata.get("memory_ids") for each in steps.AssignPaths(str(tree)).run(given)]

    (by_text,) = paths({})
    assert paths({"topic": "b"}, None, {}, {"topic": "a"}) == [[1], None, by_text, [0]]
    with pytest.raises(ValueError, match="row 2 of a batch of documents has the topic 'c'"):
        paths({"topic": "b"}, {"topic": "c"})


def test_tree_without_a_tokenizer_is_refused(built, bert, tmp_path):
    assign = pytest.importorskip("midus_hf.topics.datatrove_steps").AssignPaths
    assert list(assign(str(built)).run([])) == []
    assert list(assign(str(built)).run(None)) == []
    ClusterTree(3, ClusterTree.load(built).centroids, TreeOrigin(embedding_model=bert)).save(tmp_path / "bare")
    with pytest.raises(
        ValueError, match="does not say how windows are cut; expected a tree that 'midus cluster build'"
    ):
        list(assign(str(tmp_path / "bare")).run([]))


def test_nodes_have_their_distinctive_words():
    tree, leaves = random_tree(3, 2), np.array([0, 0, 0, 1, 4, 4, 5, 5, 5, 5])
    documents = np.array([0, 0, 1, 2, 3, 4, 5, 5, 6, 7])
    texts = ["", "the salt, an ACID of 3", "the acid and salt", "the ball game", "the ball and salt", "", "", ""]
    nodes = nodes_with_words(tree, leaves, documents, texts, 1, 16)
    assert nodes == {0: (4, ["acid", "salt", "the", "and"]), 1: (6, ["ball", "game"])}
    largest = nodes_with_words(tree, leaves, documents, texts, 2, 2)
    assert [(node, size) for node, (size, _) in largest.items()] == [(0, 3), (5, 4)], "by rising number"
    assert largest[5] == (4, [])

"""From a corpus to a tree and back to the paths of its documents."""

import dataclasses
import importlib.util
import json
import re

import numpy as np
import pytest

from midus_hf.config.wording import install_extra
from midus_hf.topics import building, run, tree_files
from midus_hf.topics.assigning import document_paths
from midus_hf.topics.building import TreeOptions
from midus_hf.topics.corpus import read_corpus
from midus_hf.topics.memory_retriever import MemoryRetriever
from midus_hf.topics.run import BuildRequest, build, open_build
from midus_hf.topics.tree import ClusterTree

OPTIONS = TreeOptions(branching=3, levels=2, steps=4, samples=50)


@pytest.fixture
def request_(bert, corpus, tmp_path):
    def make(output="tree", **given):
        return BuildRequest(corpus, bert, bert, tmp_path / output, **{"options": OPTIONS, "window_tokens": 5, **given})

    return make


def assert_equal_files(output, expected) -> None:
    for name in ("tree.json", "tree.safetensors", "windows/embeddings.npy", "windows/leaves.npy"):
        assert (output / name).read_bytes() == (expected / name).read_bytes(), name


def test_a_tree_says_what_it_was_built_with_and_where_its_windows_went(request_, bert, embedder):
    tree = build(request_())
    loaded, stored, leaves = open_build(request_().output)
    assert loaded.fingerprint == tree.fingerprint
    origin = tree.origin
    assert (origin.embedding_model, origin.embedding_fingerprint) == (bert, embedder.fingerprint)
    assert (origin.tokenizer, origin.window_tokens, origin.embedding_max_tokens, origin.seed) == (bert, 5, 24, 0)
    assert np.bincount(leaves, minlength=9).tolist() == tree.sizes[1].tolist()
    assert len(leaves) == len(stored.documents) == int(tree.sizes[0].sum())


def test_an_interrupted_clustering_goes_on_and_leaves_nothing_behind(request_, interrupted, monkeypatch):
    build(request_("whole"))
    kmeans, done = building.kmeans, []
    with interrupted(2, building, "kmeans"):
        build(request_("resumed"))
    kept = request_("resumed").output / "windows" / "clustering"
    assert kept.is_dir()
    monkeypatch.setattr(building, "kmeans", lambda *given: done.append(None) or kmeans(*given))
    build(request_("resumed"))
    assert len(done) == 3, "the root's three children: their level was not finished"
    assert not kept.exists()
    assert_equal_files(request_("resumed").output, request_("whole").output)


def test_what_was_clustered_with_other_options_is_not_taken(request_, interrupted):
    expected = build(request_("other", options=dataclasses.replace(OPTIONS, seed=1)))
    with interrupted(2, building, "kmeans"):
        build(request_())
    assert build(request_(options=dataclasses.replace(OPTIONS, seed=1))).fingerprint == expected.fingerprint


def test_two_runs_do_not_cluster_into_one_folder(request_, monkeypatch):
    cluster = run.build_tree

    def during(*given):
        with pytest.raises(ValueError, match=r"is being written by another run; wait for that run, or choose another"):
            build(request_())
        return cluster(*given)

    monkeypatch.setattr(run, "build_tree", during)
    build(request_())


def test_documents_take_the_paths_that_their_windows_took_at_building(request_, corpus, tokenizer):
    build(request_())
    tree, _, leaves = open_build(request_().output)
    retriever = MemoryRetriever.load(request_().output)
    rows = list(document_paths(retriever, tokenizer, read_corpus(corpus), 5))
    assert [row["document"] for row in rows] == list(range(39))
    assert [path[-1] for row in rows for path in row["windows"]] == leaves.tolist()
    for row in rows:
        paths = [tuple(path) for path in row["windows"]]
        assert all(path == tree.leaf_path(path[-1]) for path in paths)
        assert tuple(row["memory_ids"]) == max(paths, key=lambda path: (paths.count(path), -paths.index(path)))
    blocked = [(1, rows[0]["memory_ids"][0])]
    for row in document_paths(retriever, tokenizer, read_corpus(corpus), 5, blocked):
        assert all(path[0] != blocked[0][1] for path in row["windows"])


def test_a_tree_is_replaced_only_where_that_is_wanted_and_its_embeddings_stay(request_, monkeypatch):
    build(request_())
    with pytest.raises(
        ValueError, match=r"holds a tree; pass --overwrite to replace it, which keeps the embeddings, or"
    ):
        build(request_())
    monkeypatch.setattr("midus_hf.topics.embedding.TextEmbedder.embed", None)
    tree = build(request_(overwrite=True, options=TreeOptions(branching=2, levels=3, samples=50)))
    assert ClusterTree.load(request_().output).fingerprint == tree.fingerprint and tree.branching == 2


@pytest.mark.parametrize("overwrites", [False, True])
@pytest.mark.parametrize("moment", ["before the first", "between them"])
def test_a_build_that_is_killed_while_it_writes_the_two_files_of_a_tree_goes_on(
    request_, monkeypatch, moment, overwrites
):
    if overwrites:
        build(request_("resumed", options=dataclasses.replace(OPTIONS, seed=1)))
    whole_file, written = tree_files.whole_file, []

    def killed(path):
        written.append(path.name)
        if len(written) == 1 + (moment == "between them"):
            raise KeyboardInterrupt
        return whole_file(path)

    monkeypatch.setattr(tree_files, "whole_file", killed)
    with pytest.raises(KeyboardInterrupt):
        build(request_("resumed", overwrite=overwrites))
    monkeypatch.undo()
    output = request_("resumed").output
    assert (output / "tree.safetensors").exists() == (overwrites or moment == "between them")
    assert not (output / "tree.json").exists()
    (output / "notes.txt").write_text("a person's")
    with pytest.raises(ValueError, match="holds other files than those of a tree"):
        build(request_("resumed"))
    (output / "notes.txt").unlink()
    for again in (build(request_("resumed")), build(request_("resumed", overwrite=True)), build(request_("whole"))):
        assert again.fingerprint == ClusterTree.load(output).fingerprint
    assert_equal_files(output, request_("whole").output)


def test_centroids_that_no_build_was_at_are_a_persons(request_):
    output = request_().output
    output.mkdir()
    (output / "tree.safetensors").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="holds other files than those of a tree"):
            build(request_(overwrite=overwrite))
    assert (output / "tree.safetensors").read_text() == "mine"


def test_an_output_that_is_something_else_is_refused(request_, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"which is a file; expected a folder to make\. Name another\."):
        build(request_("file"))
    with pytest.raises(ValueError, match=r"which holds other files than those of a tree; expected a new folder\."):
        build(request_("."))


def test_clustering_needs_scikit_learn(request_, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sklearn" else find(name))
    with pytest.raises(ValueError, match=re.escape(f"needs scikit-learn; {install_extra('clusters')}.")):
        build(request_())


def test_windows_that_have_lost_something_are_refused(request_):
    build(request_())
    folder = request_().output
    windows = folder / "windows"

    def refused(message):
        with pytest.raises(ValueError, match=message):
            open_build(folder)

    np.save(windows / "leaves.npy", np.zeros(3, np.int32))
    refused(r"leaves.npy' has 3 rows; expected .* one for each window\. Build the tree again")
    (windows / "leaves.npy").unlink()
    refused(r"leaves.npy' is absent or not whole: .* Build the tree again with --overwrite\.")
    (windows / "embeddings.npy").write_bytes((windows / "embeddings.npy").read_bytes()[:-8])
    refused(r"embeddings.npy' is absent or not whole: .* Delete its folder, and build again\.")
    record = json.loads((windows / "windows.json").read_text())
    (windows / "windows.json").write_text(json.dumps({**record, "windows": None}))
    refused(r"holds no windows, or not all of a corpus")

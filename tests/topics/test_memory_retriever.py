"""A retriever gives the paths of what its embedder makes of texts, and takes no other embedder than its tree's."""

import json

import pytest
import torch
from topics.tiny_bert import WIDTH, save_tiny_bert
from topics.trees import random_tree

from midus_hf.topics.embedding import TextEmbedder
from midus_hf.topics.memory_retriever import MemoryRetriever
from midus_hf.topics.tree import ClusterTree, TreeOrigin, lasting_name

TEXTS = [f"w{index} w{index + 1} w{index // 2}" for index in range(30)]


def test_texts_that_are_near_no_topic_have_the_path_of_the_generic_memory(embedder):
    rows = embedder.embed(TEXTS)
    centroids = [rows[:3], rows[3:12]]
    cosines = torch.nn.functional.normalize(rows, dim=-1) @ torch.nn.functional.normalize(rows[:3], dim=-1).T
    nearest = cosines.max(dim=-1).values
    limit = nearest.sort().values[10].item() + 1e-4
    free, limited = ClusterTree(3, centroids), ClusterTree(3, centroids, min_similarity=limit)
    torch.testing.assert_close(free.similarity(rows), nearest)
    paths, is_far = MemoryRetriever(limited, embedder).paths(TEXTS), nearest < limit
    assert (paths[is_far] == -1).all() and is_far.sum() == 11
    assert torch.equal(paths[~is_far], free.paths(rows)[~is_far])
    for tree in (ClusterTree(3, centroids, min_similarity=-1), free):
        assert torch.equal(MemoryRetriever(tree, embedder).paths(TEXTS), free.paths(rows))


def test_a_saved_tree_finds_its_model_again_also_from_another_folder(tmp_path, monkeypatch):
    folder = save_tiny_bert(tmp_path / "near" / "model")
    monkeypatch.chdir(folder.parent)
    name, usual = lasting_name("model"), TextEmbedder("model", max_tokens=12)
    random_tree(width=WIDTH, origin=TreeOrigin(name, usual.fingerprint, embedding_max_tokens=12)).save(
        tmp_path / "tree"
    )
    monkeypatch.chdir(tmp_path)
    again = MemoryRetriever.load("tree")
    assert (again.embedder.name, again.embedder.max_tokens) == (str(folder), 12)
    paths = again.paths([*TEXTS, "", "  \n"])
    assert torch.equal(paths[:-2], random_tree(width=WIDTH).paths(usual.embed(TEXTS)))
    assert (paths[:-2] >= 0).all() and (paths[-2:] == -1).all(), "a blank text is about nothing"


def test_a_model_that_has_moved_is_named_anew_in_the_trees_record_and_another_is_refused(tmp_path):
    folder = save_tiny_bert(tmp_path / "gone")
    tree = random_tree(width=WIDTH, origin=TreeOrigin(str(folder), TextEmbedder(str(folder)).fingerprint))
    tree.save(tmp_path / "tree")
    file = tmp_path / "tree" / "tree.json"

    def rename(model):
        file.write_text(json.dumps({**json.loads(file.read_text()), "embedding_model": str(model)}))

    moved = folder.rename(tmp_path / "moved")
    message = rf"with the embedding model '{folder}', which is not there; .* as embedding_model in {file}\."
    with pytest.raises(ValueError, match=message):
        MemoryRetriever.load(tmp_path / "tree")
    rename(moved)
    loaded = MemoryRetriever.load(tmp_path / "tree")
    assert loaded.embedder.name == str(moved) and loaded.tree.fingerprint == tree.fingerprint
    rename(save_tiny_bert(tmp_path / "other", seed=1))
    with pytest.raises(ValueError, match=r"has the fingerprint .*\.\.\.; expected .*, with which the tree was built"):
        MemoryRetriever.load(tmp_path / "tree")


def test_a_tree_that_names_no_model_needs_one(tmp_path):
    random_tree(width=WIDTH).save(tmp_path)
    message = rf"does not say which model embeds its texts; .* hub id as embedding_model in {tmp_path}/tree\.json\."
    with pytest.raises(ValueError, match=message):
        MemoryRetriever.load(tmp_path)

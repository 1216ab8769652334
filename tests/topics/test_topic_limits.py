"""Limits of topics: set by held-out documents, kept with the tree, and a text beyond them has no topic."""

import numpy as np
import pytest
import torch
from sft.tiny_chats import write_rows
from tiny import json_rows
from topics.trees import random_tree

from midus_hf.cli.clusters import main
from midus_hf.config.errors import RequestError
from midus_hf.data.held_out import belongs_to_share
from midus_hf.topics.building import (
    TreeOptions,
    build_tree,
    grow_tree,
    held_out_documents,
    set_topic_limits,
    topic_tree,
)
from midus_hf.topics.memory_retriever import paths_near_topics
from midus_hf.topics.run import open_build
from midus_hf.topics.tree import ClusterTree, TreeOrigin

WIDTH = 8


def rows_near(direction: int, count: int, noise: float) -> np.ndarray:
    generator = np.random.default_rng([direction, count])
    rows = np.eye(WIDTH)[direction] + noise * generator.standard_normal((count, WIDTH))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def built_with(quantile, counts=(100, 100), noises=(0.05, 0.3)):
    """A tree of named topics, a tight and a wide one; half of the documents are held out."""
    topics = np.repeat(np.arange(len(counts)), counts)
    embeddings = np.concatenate([rows_near(each, counts[each], noises[each]) for each in range(len(counts))])
    held_out = np.arange(len(topics)) % 2 == 0
    built = topic_tree(embeddings, topics[:, None], 2, TreeOrigin(), held_out)
    built.tree.min_similarity = None
    options = TreeOptions(topic_quantile=quantile)
    set_topic_limits(built, embeddings, np.arange(len(topics)), held_out, options)
    return built, torch.from_numpy(embeddings[held_out]), topics[held_out]


@pytest.mark.parametrize("quantile", [0.9, 0.95, 1.0])
def test_limit_lets_the_share_of_held_out_texts_in(quantile):
    built, embeddings, topics = built_with(quantile)
    tree = built.tree
    has_topic = tree.has_topic(embeddings, torch.from_numpy(topics[:, None])).numpy()
    for topic in (0, 1):
        assert quantile <= has_topic[topics == topic].mean() <= quantile + 0.05
    assert tree.topic_limits[0] > tree.topic_limits[1], "each topic has its own"


def test_text_beyond_the_limit_of_its_topic_has_none():
    tree = built_with(1.0)[0].tree
    text = torch.nn.functional.normalize(torch.eye(WIDTH)[:1] + 0.7 * torch.eye(WIDTH)[3:4])
    near_wide = torch.nn.functional.normalize(torch.eye(WIDTH)[1:2] + 0.7 * torch.eye(WIDTH)[3:4])
    assert tree.paths(torch.cat([text, near_wide])).tolist() == [[0], [1]]
    assert paths_near_topics(tree, torch.cat([text, near_wide])).tolist() == [[-1], [1]]
    tree.topic_limits = [None, tree.topic_limits[1]]
    assert paths_near_topics(tree, text).tolist() == [[0]]


def test_topic_of_few_documents_gets_no_limit_and_this_is_said(capsys):
    tree = built_with(0.95, counts=(100, 38))[0].tree
    assert tree.topic_limits[0] is not None and tree.topic_limits[1] is None
    line = "topics with fewer than 20 held-out documents, which get no limit: 1\n"
    assert capsys.readouterr().err == line
    assert built_with(None)[0].tree.topic_limits is None


def test_documents_are_held_out_whole_by_their_text():
    texts = [f"text {number}" for number in range(500)]
    documents = np.repeat(np.arange(500), 3)
    held_out = held_out_documents(texts, documents, TreeOptions(topic_quantile=0.95)).reshape(500, 3)
    expected = np.array([belongs_to_share(text, 0.2) for text in texts])
    assert 60 < expected.sum() < 140 and (held_out == expected[:, None]).all()
    assert not held_out_documents(texts, documents, TreeOptions()).any()


def test_saved_and_cut_trees_keep_their_limits(tmp_path):
    tree = random_tree(3, 2, origin=TreeOrigin(topic_quantile=0.95), topic_limits=[0.5, None, -0.25])
    tree.save(tmp_path)
    again = ClusterTree.load(tmp_path)
    assert again.topic_limits == [0.5, None, -0.25] and again.origin.topic_quantile == 0.95
    assert again.fingerprint == random_tree(3, 2).fingerprint, "limits change no path in the tree"
    assert again.without([(1, 0), (2, 7)]).topic_limits == [None, None, -0.25]


@pytest.mark.parametrize("limits", [[0.5], [0.5, None, 1.5], [0.5, None, "0.1"], [0.5, None, True]])
def test_wrong_limits_are_refused(limits):
    with pytest.raises(RequestError, match=r"^topic_limits are \[0.5.*; expected 3, each a cosine .* Build the tree"):
        random_tree(3, 2, topic_limits=limits)


@pytest.mark.parametrize("quantile", [0, -0.1, 1.5, float("nan")])
def test_quantile_that_is_no_share_is_refused(quantile):
    with pytest.raises(RequestError, match=r"^topic_quantile is .*; expected a share above 0 and at most 1, such as"):
        TreeOptions(topic_quantile=quantile)


def test_grown_tree_gives_limits_to_new_topics_only():
    options = TreeOptions(branching=2, levels=1, steps=4, samples=64, topic_quantile=0.95)
    old = build_tree(np.concatenate([rows_near(0, 60, 0.05), rows_near(1, 60, 0.05)]), options).tree
    old.topic_limits = [0.9, None]
    # The last rows are near an old topic, and beyond its limit.
    embeddings = np.concatenate([rows_near(0, 50, 0.01), rows_near(4, 200, 0.05), rows_near(0, 200, 0.3)])
    held_out = np.arange(len(embeddings)) % 2 == 0
    grown = grow_tree(old, embeddings, options, held_out)
    assert (grown.leaves[:50] < 2).all() and (grown.leaves[-200:] >= 2).any()
    set_topic_limits(grown, embeddings, np.arange(len(embeddings)), held_out, options, first=old.roots)
    assert grown.tree.topic_limits[:2] == [0.9, None]
    assert all(limit is not None for limit in grown.tree.topic_limits[2:])


def test_build_and_assign_say_who_has_no_topic(bert, tmp_path, capsys):
    rows = [
        {"text": f"w{number % 7} w{number % 5} w{number // 7}", "topic": "ab"[number % 2]} for number in range(300)
    ]
    corpus = write_rows(tmp_path / "rows.jsonl", rows)
    words = f"build --corpus {corpus} --embedding-model {bert} --tokenizer {bert} --topic-column topic --topic-quantile 0.5"
    assert main([*words.split(), "--output", str(tmp_path / "tree"), "--device", "cpu"]) == 0
    assert "least similarity of a topic's texts: 0: 0." in capsys.readouterr().out
    tree = ClusterTree.load(tmp_path / "tree")
    assert tree.origin.topic_quantile == 0.5 and None not in tree.topic_limits
    write_rows(tmp_path / "others.jsonl", [{"text": row["text"]} for row in rows])
    words = (
        f"assign --tree {tmp_path / 'tree'} --corpus {tmp_path / 'others.jsonl'} --output {tmp_path / 'paths.jsonl'}"
    )
    assert main([*words.split(), "--device", "cpu"]) == 0
    far = sum(row["memory_ids"] == [-1] for row in json_rows(tmp_path / "paths.jsonl"))
    assert 0 < far < 300
    assert f"paths of 300 documents, {far} of which have no topic (-1)" in capsys.readouterr().out


def test_quantiles_give_one_tree_with_other_limits(bert, tree_of_corpus, tmp_path, capsys):
    sizes = {"branching": 3, "levels": 2, "steps": 4, "samples": 50}
    trees = [
        tree_of_corpus(tmp_path / f"{quantile}", options=TreeOptions(**sizes, topic_quantile=quantile))
        for quantile in (0.9, 1.0)
    ]
    assert trees[0].fingerprint == trees[1].fingerprint
    assert "which get no limit: 0, 1, 2" in capsys.readouterr().err
    assert open_build(tmp_path / "0.9")[0].topic_limits == [None, None, None]

"""Documents that have paths are packed within the leaves of a tree, and their sequences come with these paths."""

import json

import numpy as np
import pytest
import torch
from training.tiny_run import refused, tiny_tokenizer

from midus_hf.config.fetched_blocks import BankLayout, FetchedBlocks
from midus_hf.topics.documents import read_paths
from midus_hf.topics.text_files import DocumentError
from midus_hf.training.data.clustered_corpus import ClusteredDataset, check_paths
from midus_hf.training.data.former_corpus import find_corpus
from midus_hf.training.data.former_packing import IGNORED_LABEL
from midus_hf.training.data.token_cache import cached_tokens
from midus_hf.training.options import CorpusOptions

EOS, T = 2, 5
# The path of each document, and how many words it has; EOS makes one token more.
ROWS = [([0, 1], 3), ([2, 7], 4), ([0, 1], 6), ([0, 0], 1), ([2, 7], 12), ([0, 1], 2)]


def words(document: int, count: int) -> list[str]:
    """Words that tell their document and their place."""
    return [f"w{10 + 15 * document + place}" for place in range(count)]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    rows = [{"text": " ".join(words(index, count)), "memory_ids": ids} for index, (ids, count) in enumerate(ROWS)]
    rows.insert(2, {"text": "  ", "memory_ids": [1, 1]})  # nothing to see, and left out everywhere
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return find_corpus(CorpusOptions(path=str(path), path_column="memory_ids"))


def dataset(corpus, tmp_path, **options):
    tokens = cached_tokens(corpus, tiny_tokenizer(), 128, str(tmp_path / "cache"))
    return ClusteredDataset(tokens, read_paths(corpus.rows(), "memory_ids").paths, T, EOS, **options)


def expected_sequences() -> list[tuple[list[int], list[int]]]:
    """Path and tokens of each sequence, by a loop over leaves."""
    sequences = []
    for path in sorted({tuple(ids) for ids, _ in ROWS}):
        tokens = []
        for index, (ids, count) in enumerate(ROWS):
            if tuple(ids) == path:
                tokens += [int(word[1:]) for word in words(index, count)] + [EOS]
        sequences += [(list(path), tokens[start : start + T]) for start in range(0, len(tokens), T)]
    return sequences


def test_sequences_are_of_one_leaf_and_come_with_its_path(corpus, tmp_path):
    made, expected = dataset(corpus, tmp_path), expected_sequences()
    assert len(made) == len(expected) == 8 and made.num_leaves == 3
    for example, (path, tokens) in zip(made, expected, strict=True):
        assert example["memory_ids"].tolist() == path
        filled = T - len(tokens)
        assert example["input_ids"].tolist() == tokens + [EOS] * filled
        assert example["labels"].tolist() == tokens + [IGNORED_LABEL] * filled
    assert "position_ids" not in made[0]


def test_documents_that_fetch_the_same_are_packed_together(corpus, tmp_path):
    made = dataset(corpus, tmp_path, depth=1)
    assert made.num_leaves == 2
    paths = {tuple(example["memory_ids"].tolist()) for example in made}
    assert paths == {(0, 1), (2, 7)}, "below the leaf it is the path of its first document"
    tokens = torch.cat([example["input_ids"][example["labels"] != IGNORED_LABEL] for example in made]).tolist()
    in_order = [index for node in (0, 2) for index, (ids, _) in enumerate(ROWS) if ids[0] == node]
    expected = []
    for index in in_order:
        expected += [int(word[1:]) for word in words(index, ROWS[index][1])] + [EOS]
    assert tokens == expected


def test_every_token_is_a_label_once(corpus, tmp_path):
    labels = torch.cat([example["labels"] for example in dataset(corpus, tmp_path)])
    assert (labels != IGNORED_LABEL).sum() == sum(count + 1 for _, count in ROWS)


def test_positions_restart_with_each_document_and_where_a_sequence_is_filled_up(corpus, tmp_path):
    made = dataset(corpus, tmp_path, document_mask=True)
    for example in made:
        tokens, positions = example["input_ids"].tolist(), example["position_ids"].tolist()
        for place in range(1, T):
            begins = tokens[place - 1] == EOS and positions[place - 1] >= 0
            if begins and tokens[place] != EOS:
                assert positions[place] == 0 and example["labels"][place] == IGNORED_LABEL
    last_of_first_leaf = made[0]  # one word, EOS, and three tokens that fill up
    assert last_of_first_leaf["position_ids"].tolist() == [0, 1, 0, 1, 2]


def rows_of(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": "w3", **row}) + "\n" for row in rows))
    return find_corpus(CorpusOptions(path=str(path), path_column="memory_ids")).rows()


def test_documents_near_no_topic_are_a_leaf_of_their_own_and_fetch_the_generic_memory(tmp_path):
    paths = read_paths(rows_of(tmp_path, {"memory_ids": [0, 1]}, {"memory_ids": [-1, -1]}), "memory_ids")
    assert paths.paths.tolist() == [[0, 1], [-1, -1]] and paths.tree is None
    check_paths(paths.paths, layout(), "memory_ids")


def test_paths_are_found_where_datatrove_writes_them_and_name_their_tree(tmp_path):
    rows = [{"memory_ids": [0, 1], "memory_tree": "ab"}, {"metadata": {"memory_ids": [1, 2], "memory_tree": "ab"}}]
    paths = read_paths(rows_of(tmp_path, *rows), "memory_ids")
    assert paths.paths.tolist() == [[0, 1], [1, 2]] and paths.tree == "ab"


@pytest.mark.parametrize("other, named", [({"memory_tree": "c" * 64}, "cccccccccccccccc..."), ({}, "nothing")])
def test_paths_of_several_trees_are_refused(other, named, tmp_path):
    rows = rows_of(tmp_path, {"memory_ids": [0, 1], "memory_tree": "ab"}, {"memory_ids": [0, 1], **other})
    with refused(rf"line 2 .* has {named} under 'memory_tree', and the rows before it have ab", DocumentError):
        read_paths(rows, "memory_ids")


@pytest.mark.parametrize(
    "row, message",
    [
        (
            {"text": "w3"},
            "line 2 .* has None under 'memory_ids'; expected the document's node at each level of the tree",
        ),
        ({"text": "w3", "memory_ids": [1]}, r"line 2 .* has \[1\] under 'memory_ids'"),
        ({"text": "w3", "memory_ids": [1, -1]}, r"line 2 .* has \[1, -1\] under"),
        ({"text": "w3", "memory_ids": "1, 2"}, "line 2 .* has '1, 2' under"),
    ],
    ids=["none", "length", "negative", "words"],
)
def test_rows_without_a_path_are_refused(tmp_path, row, message):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in ({"text": "w3", "memory_ids": [1, 2]}, row)))
    corpus = find_corpus(CorpusOptions(path=str(path), path_column="memory_ids"))
    with refused(message, DocumentError):
        read_paths(corpus.rows(), "memory_ids")


def test_plain_text_has_no_paths(tmp_path):
    (tmp_path / "a.txt").write_text("w3")
    corpus = find_corpus(CorpusOptions(path=str(tmp_path), path_column="memory_ids"))
    with refused("is plain text, which has no columns; expected JSON lines or Parquet", DocumentError):
        read_paths(corpus.rows(), "memory_ids")


def layout(branching=2, levels=2):
    return {"hier-ffn": BankLayout("hier-ffn", (0,), FetchedBlocks(branching, ({},) * levels))}


@pytest.mark.parametrize(
    "paths, banks, message",
    [
        ([[0, 0]], {}, "corpus.path_column is 'memory_ids', but the model has no memory that fetches blocks"),
        ([[0, 0, 0]], layout(), "paths of 3 levels, and the model's banks have 2; expected one tree"),
        ([[0, 0], [1, 4]], layout(), "node 4 of level 2, where the model's banks have 4 blocks"),
        ([[2, 0]], layout(), "node 2 of level 1, where the model's banks have 2 blocks"),
        (
            [[0, 1], [1, 1]],
            layout(),
            r"has the path \[1, 1\], whose node 1 of level 2 is no child of node 1; expected 2 to 3, the children of that node",
        ),
        (
            [[-1, -1], [0, -1]],
            layout(),
            r"has the path \[0, -1\]; expected a node of each level of the tree, or -1 at each",
        ),
        ([[-1, 0]], layout(), r"has the path \[-1, 0\]; expected a node of each level"),
        ([[-2, -2]], layout(), r"has the path \[-2, -2\]; expected a node of each level"),
    ],
    ids=["no-banks", "levels", "leaf", "root", "stray", "negative-leaf", "negative-root", "not-the-generic"],
)
def test_paths_of_another_tree_are_refused(paths, banks, message):
    with refused(message):
        check_paths(np.array(paths), banks, "memory_ids")

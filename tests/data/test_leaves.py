"""Texts that have paths are packed within the leaves of a tree, and their sequences come with these paths."""

import datasets
import numpy as np
import pytest
from training.tiny_run import framing_tokenizer, tiny_tokenizer

from midus_hf.data.packing import leaf_sequences

EOS, T = 2, 5
# The path of each text, and how many words it has; EOS makes one token more.
ROWS = [([0, 1], 3), ([2, 7], 4), ([0, 1], 6), ([0, 0], 1), ([2, 7], 12), ([0, 1], 2)]


def words(number: int, count: int) -> list[str]:
    return [f"w{10 + 15 * number + index}" for index in range(count)]


def rows():
    texts = [" ".join(words(number, count)) for number, (_, count) in enumerate(ROWS)]
    return datasets.Dataset.from_dict({"text": texts, "path": [path for path, _ in ROWS]})


def expected(depth=2) -> list[tuple[list[int], list[list[int]]]]:
    """Path and tokens of each sequence, and which of them begin a text, by a loop over leaves."""
    made = []
    for leaf in sorted({tuple(path[:depth]) for path, _ in ROWS}):
        tokens, starts = [], []
        texts = [(number, *row) for number, row in enumerate(ROWS) if tuple(row[0][:depth]) == leaf]
        for number, _, count in texts:
            starts += [True] + [False] * count
            tokens += [int(word[1:]) for word in words(number, count)] + [EOS]
        for begin in range(0, len(tokens) - 1, T):
            made.append((texts[0][1], tokens[begin : begin + T], starts[begin : begin + T]))
    return made


@pytest.mark.parametrize(("depth", "apart"), [(1, False), (2, False), (2, True)])
def test_sequences_are_of_one_leaf_and_come_with_its_path(depth, apart):
    paths = np.array([path for path, _ in ROWS])
    options = {"paths": paths, "depth": depth, "documents_apart": apart, "vocab_size": 128}
    made = leaf_sequences(rows(), tiny_tokenizer(), T, **options).sequences
    assert made.column_names == ["input_ids", *(["position_ids"] if apart else []), "labels", "memory_ids"]
    for row, (path, tokens, starts) in zip(made, expected(depth), strict=True):
        filled, labels = T - len(tokens), tokens
        if apart:
            labels = [-100 if start else token for token, start in zip(tokens, starts, strict=True)]
            positions, position = [], 0
            for index, start in enumerate(starts + [at == 0 for at in range(filled)]):
                position = 0 if start or index == 0 else position + 1
                positions.append(position)
            assert row["position_ids"] == positions
        assert row["memory_ids"] == path
        assert row["input_ids"] == tokens + [EOS] * filled
        assert row["labels"] == labels + [-100] * filled


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("count", [T - 1, T, T + 1])
def test_a_remainder_that_predicts_nothing_is_left_out(count, apart):
    """One token behind a whole sequence, with whose labels a batch would have a loss that is not a number."""
    text = datasets.Dataset.from_dict({"text": [" ".join(f"w{10 + n}" for n in range(count))]})
    options = {"paths": np.array([[0, 1]]), "documents_apart": apart}
    packed, tokens, dropped, _ = leaf_sequences(text, tiny_tokenizer(), T, **options)
    assert (tokens, dropped) == (count + 1, int(count == T))
    assert len(packed) == (2 if count == T + 1 else 1)
    assert all(any(label != -100 for label in labels[1:]) for labels in packed["labels"])


@pytest.mark.parametrize("apart", [False, True])
def test_leaf_sequences_begin_with_the_prefix(apart):
    """So a last token of a leaf is predicted, from that, and a leaf whose tokens fill a sequence has no remainder."""
    texts = datasets.Dataset.from_dict({"text": ["w10 w11 w12 w13", "w20 w21 w22", "w30 w31"]})  # 6, 5 and 4 tokens
    options = {"paths": np.array([[0, 0], [0, 1], [0, 2]]), "documents_apart": apart}
    made, tokens, dropped, is_short = leaf_sequences(texts, framing_tokenizer("<bos> $A"), T, **options)
    assert (tokens, dropped, is_short) == (15, 0, True)
    last, ids = [EOS] * 4, [[10, 11, 12, 13], [20, 21, 22, EOS], [30, 31, EOS, EOS]]
    assert made["input_ids"] == [[1, *row] for row in (ids[0], last, *ids[1:])]
    first = -100 if apart else 1
    assert made["labels"][:2] == [[first, *ids[0]], [-100, EOS, -100, -100, -100]]
    assert made["labels"][2:] == [[first, *ids[1]], [first, 30, 31, EOS, -100]]

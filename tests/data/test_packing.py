"""Texts become sequences of one length, also within the leaves of a tree: nothing is lost but a remainder of at most 1 %."""

import itertools

import datasets
import hypothesis
import numpy as np
import pytest
from training.tiny_run import EOS_ID, document, framing_tokenizer, tiny_tokenizer

from midus_hf.data import packing
from midus_hf.data.packing import Packer, collate, leaf_sequences, packed_sequences

given, st = hypothesis.given, hypothesis.strategies


@given(
    st.lists(st.lists(st.integers(10, 19), max_size=30), min_size=1, max_size=12),
    st.integers(4, 12),
    st.integers(1, 4),
    st.sampled_from([[], [1], [1, 0], [1, 0, 2]]),
)
def test_packing_keeps_order_and_adds_the_prefix_without_loss(contents, length, texts_a_batch, beginning):
    token_lists = [[*beginning, *content, EOS_ID] for content in contents]
    stream = [(token, place) for tokens in token_lists for place, token in enumerate(tokens)]
    packer, packed = Packer(length, True, beginning), {"input_ids": [], "position_ids": [], "labels": []}
    for begin in range(0, len(token_lists), texts_a_batch):
        for name, made in packer({"input_ids": token_lists[begin : begin + texts_a_batch]}).items():
            packed[name] += [list(map(int, each)) for each in made]
    for ids, positions, labels in zip(*packed.values(), strict=True):
        assert ids[: len(beginning)] == beginning
        assert len(ids) == length
        added = min(stream[0][1], len(beginning))
        read, stream = stream[: length - added], stream[length - added :]
        assert ids[added:] == [token for token, _ in read]
        # What goes on with a text is one document with what is put in front of it, and a sequence begins one.
        starts = [True, *[at == 0 for at in [*range(added), *(place for _, place in read)]][1:]]
        assert [position == 0 for position in positions] == starts
        assert all(after in (0, before + 1) for before, after in itertools.pairwise(positions))
        assert labels == [-100] * added + [-100 if place == 0 else token for token, place in read]
    assert len(stream) < length
    rest = (len(stream), min(stream[0][1], len(beginning)) if stream else 0)
    assert packing._remainder(np.array([*map(len, token_lists)]), length, len(beginning)) == rest


def rows(texts):
    return datasets.Dataset.from_dict({"text": texts})


def test_tokenised_texts_end_in_eos_and_are_cached(tmp_path, monkeypatch):
    rows([document(30, index) for index in range(9)]).to_parquet(tmp_path / "texts.parquet")
    options = {"data_files": str(tmp_path / "texts.parquet"), "cache_dir": str(tmp_path / "cache")}
    texts = datasets.load_dataset("parquet", split="train", **options)
    tokenizer = tiny_tokenizer()
    expected = [token for text in texts["text"] for token in (*tokenizer(text)["input_ids"], EOS_ID)]
    packed = packed_sequences(texts, tokenizer, 16, documents_apart=False).sequences
    assert packed.column_names == ["input_ids"]
    assert np.concatenate(packed["input_ids"][:]).tolist() == expected
    # Another tokenizer of the same contents finds the sequences in the cache, another length does not.
    monkeypatch.setattr(packing, "tokenise", None)
    assert packed_sequences(texts, tiny_tokenizer(), 16, documents_apart=False).sequences[:] == packed[:]
    assert len(packed_sequences(texts, tiny_tokenizer(), 8, documents_apart=False).sequences) > len(packed)
    with pytest.raises(TypeError):
        packed_sequences(texts.select([0]), tiny_tokenizer(), 16, documents_apart=False)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("rest", [0, 1, 2, 9, 15])
def test_remainder_is_a_short_sequence_if_it_predicts(rest, apart):
    texts = rows([document(15, 1), document(15 + rest, 2)])  # each with an end
    sequences, tokens, dropped, is_short = packed_sequences(texts, tiny_tokenizer(), 16, documents_apart=apart)
    assert (tokens, dropped, is_short) == (32 + rest, int(rest == 1), rest > 1)
    assert list(map(len, sequences["input_ids"])) == [16, 16] + [rest] * is_short
    expected = [token for text in texts["text"] for token in (*tiny_tokenizer()(text)["input_ids"], EOS_ID)]
    assert np.concatenate(sequences["input_ids"][:]).tolist() == expected[: tokens - dropped]
    if apart:  # the last sequence goes on with a text, so that its first token is a label as all others
        assert [row.count(-100) for row in sequences["labels"]] == [1, 1] + [0] * is_short
        assert all(row == list(range(len(row))) for row in sequences["position_ids"])


def test_short_sequence_has_text_end_and_whole_texts():
    texts = rows([document(20, 1), document(2, 2), document(3, 3)])  # 21 + 3 + 4 tokens
    *_, last = packed_sequences(texts, tiny_tokenizer(), 16, documents_apart=True).sequences
    assert last["position_ids"] == [*range(5), *range(3), *range(4)]
    assert [index for index, label in enumerate(last["labels"]) if label == -100] == [5, 8]
    texts = rows([document(14, 1), document(3, 2)])  # the last sequence begins with a text, which has its prefix
    last = packed_sequences(texts, framing_tokenizer("<bos> $A"), 16, documents_apart=False).sequences[1]
    assert last["input_ids"] == [1, *tiny_tokenizer()(texts["text"][1])["input_ids"], EOS_ID]


@pytest.mark.parametrize(
    ("frame", "beginning"),
    [("$A", []), ("$A <eos>", []), ("<bos> $A", [1]), ("<bos> $A <eos>", [1]), ("<bos> <pad> $A", [1, 0])],
)
def test_sequences_begin_with_the_tokenizer_prefix(frame, beginning):
    texts = rows([document(20, 1), document(9, 2), document(21, 3)])
    sequences, tokens, dropped, is_short = packed_sequences(texts, framing_tokenizer(frame), 16, documents_apart=False)
    whole = [token for text in texts["text"] for token in (*beginning, *tiny_tokenizer()(text)["input_ids"], EOS_ID)]
    assert (tokens, dropped, is_short) == (len(whole), 0, True)
    assert sequences.column_names == ["input_ids", *(["labels"] if len(beginning) > 1 else [])]
    assert all(row[: len(beginning)] == beginning for row in sequences["input_ids"])
    starts = [0, 21 + len(beginning), 31 + 2 * len(beginning)]
    read: list[int] = []
    for row in sequences:
        added = 0 if len(read) in starts else len(beginning)
        if len(beginning) > 1:
            assert row["labels"] == [-100] * added + row["input_ids"][added:]
        read += row["input_ids"][added:]
    assert read == whole


def test_separate_texts_continue_after_the_prefix():
    texts = rows([document(10, 1), document(3, 2)])  # 12 and 5 tokens
    first, second, last = packed_sequences(texts, framing_tokenizer("<bos> $A"), 8, documents_apart=True).sequences
    ids = tiny_tokenizer()(texts["text"][:])["input_ids"]
    assert (first["input_ids"], first["position_ids"]) == ([1, *ids[0][:7]], [*range(8)])
    assert second["input_ids"] == [1, *ids[0][7:], EOS_ID, 1, *ids[1][:2]]
    assert second["position_ids"] == [*range(5), *range(3)]
    assert second["labels"] == [-100, *ids[0][7:], EOS_ID, -100, *ids[1][:2]]
    rest = [*ids[1][2:], EOS_ID]
    assert last == {"input_ids": [1, *rest], "position_ids": [0, 1, 2], "labels": [-100, *rest]}


def test_short_sequence_that_begins_with_a_text_has_one_prefix():
    texts = rows([document(6, 1), document(1, 2), document(2, 3)])  # 8, 3 and 4 tokens
    _, last = packed_sequences(texts, framing_tokenizer("<bos> $A"), 8, documents_apart=True).sequences
    second, third = (tiny_tokenizer()(text)["input_ids"] for text in texts["text"][1:])
    assert last["input_ids"] == [1, *second, EOS_ID, 1, *third, EOS_ID]
    assert last["position_ids"] == [*range(3), *range(4)]


def test_a_remainder_of_a_hundredth_is_dropped_and_said():
    for words, dropped in ((1615, 16), (1616, 0)):
        packed = packed_sequences(rows([document(words, 1)]), tiny_tokenizer(), 1600, documents_apart=False)
        assert packed.dropped == dropped
        assert len(packed.sequences) == (1 if dropped else 2)
    assert packed.phrase(1600).startswith("1,617 of 1,617 tokens are read, in 2 sequences of 1,600")


def test_short_row_is_padded_and_masked():
    short, whole = {"input_ids": [5, 6]}, {"input_ids": [7, 8, 9, 10]}
    batch = {name: tensor.tolist() for name, tensor in collate([short, whole], 4, EOS_ID).items()}
    assert batch == {
        "input_ids": [[5, 6, EOS_ID, EOS_ID], whole["input_ids"]],
        "labels": [[5, 6, -100, -100], whole["input_ids"]],
        "attention_mask": [[1, 1, 0, 0], [1, 1, 1, 1]],
    }
    assert collate([whole], 4, EOS_ID).keys() == {"input_ids", "labels"}
    apart = collate([{**short, "labels": [-100, 6], "position_ids": [0, 1]}], 4, EOS_ID)
    assert apart["position_ids"].tolist() == [[0, 1, 0, 1]]
    assert apart["labels"].tolist() == [[-100, 6, -100, -100]]
    assert "attention_mask" not in apart


T = 5
# The path of each text, and how many words it has; EOS makes one token more.
ROWS = [([0, 1], 3), ([2, 7], 4), ([0, 1], 6), ([0, 0], 1), ([2, 7], 12), ([0, 1], 2)]


def words(number: int, count: int) -> list[str]:
    return [f"w{10 + 15 * number + index}" for index in range(count)]


def rows_with_paths():
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
            tokens += [int(word[1:]) for word in words(number, count)] + [EOS_ID]
        for begin in range(0, len(tokens) - 1, T):
            made.append((texts[0][1], tokens[begin : begin + T], starts[begin : begin + T]))
    return made


@pytest.mark.parametrize(("depth", "apart"), [(1, False), (2, False), (2, True)])
def test_sequences_are_of_one_leaf_and_come_with_its_path(depth, apart):
    paths = np.array([path for path, _ in ROWS])
    options = {"paths": paths, "depth": depth, "documents_apart": apart, "vocab_size": 128}
    made = leaf_sequences(rows_with_paths(), tiny_tokenizer(), T, **options).sequences
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
        assert row["input_ids"] == tokens + [EOS_ID] * filled
        assert row["labels"] == labels + [-100] * filled


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("count", [T - 1, T, T + 1])
def test_a_remainder_that_predicts_nothing_is_left_out(count, apart):
    """With the labels of one token after a whole sequence, a batch's loss would not be a number."""
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
    last, ids = [EOS_ID] * 4, [[10, 11, 12, 13], [20, 21, 22, EOS_ID], [30, 31, EOS_ID, EOS_ID]]
    assert made["input_ids"] == [[1, *row] for row in (ids[0], last, *ids[1:])]
    first = -100 if apart else 1
    assert made["labels"][:2] == [[first, *ids[0]], [-100, EOS_ID, -100, -100, -100]]
    assert made["labels"][2:] == [[first, *ids[1]], [first, 30, 31, EOS_ID, -100]]

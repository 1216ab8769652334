"""Texts become sequences of one length: nothing is lost but the remainder, and order is kept."""

import itertools

import numpy as np
import pytest
from training.tiny_run import EOS_ID, document, tiny_tokenizer

hypothesis = pytest.importorskip("hypothesis")
datasets = pytest.importorskip("datasets")

from midus_hf.training.data import packing  # noqa: E402
from midus_hf.training.data.packing import Packer, packed_sequences  # noqa: E402

given, st = hypothesis.given, hypothesis.strategies


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=30), min_size=1, max_size=12),
    st.integers(2, 12),
    st.integers(1, 4),
)
def test_packing_keeps_tokens_in_order_and_restarts_positions(token_lists, length, texts_a_batch):
    row = list(itertools.chain(*token_lists))
    is_first = [index == 0 for tokens in token_lists for index in range(len(tokens))]
    packer, packed = Packer(length, documents_apart=True), {"input_ids": [], "position_ids": [], "labels": []}
    for begin in range(0, len(token_lists), texts_a_batch):
        for name, rows in packer({"input_ids": token_lists[begin : begin + texts_a_batch]}).items():
            packed[name] += [list(map(int, each)) for each in rows]
    whole = len(row) // length * length
    assert list(itertools.chain(*packed["input_ids"])) == row[:whole]
    expected, position = [], 0
    for index in range(whole):
        position = 0 if is_first[index] or index % length == 0 else position + 1
        expected.append(position)
    assert list(itertools.chain(*packed["position_ids"])) == expected
    labels = [-100 if first else token for first, token in zip(is_first[:whole], row, strict=False)]
    assert list(itertools.chain(*packed["labels"])) == labels


def rows(texts):
    return datasets.Dataset.from_dict({"text": texts})


def test_texts_are_tokenised_with_an_end_and_read_from_the_cache_again(tmp_path, monkeypatch):
    rows([document(30, index) for index in range(9)]).to_parquet(tmp_path / "texts.parquet")
    texts = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "texts.parquet"), split="train", cache_dir=str(tmp_path / "cache")
    )
    tokenizer = tiny_tokenizer()
    expected = [token for text in texts["text"] for token in (*tokenizer(text)["input_ids"], EOS_ID)]
    packed = packed_sequences(texts, tokenizer, 16, documents_apart=False)
    assert packed.column_names == ["input_ids"]
    assert np.concatenate(packed["input_ids"][:]).tolist() == expected[: len(expected) // 16 * 16]
    # Another tokenizer of the same contents finds the sequences in the cache, another length does not.
    monkeypatch.setattr(packing, "_tokenise", None)
    assert packed_sequences(texts, tiny_tokenizer(), 16, documents_apart=False)[:] == packed[:]
    assert len(packed_sequences(texts, tiny_tokenizer(), 8, documents_apart=False)) > len(packed)
    with pytest.raises(TypeError):
        packed_sequences(texts.select([0]), tiny_tokenizer(), 16, documents_apart=False)


def test_several_batches_make_the_same_sequences(monkeypatch):
    texts = rows([document(30, index % 7) for index in range(40)])
    alone = packed_sequences(texts, tiny_tokenizer(), 16, documents_apart=True)
    monkeypatch.setattr(packing, "_TEXTS_A_BATCH", 3)
    texts = texts.map(lambda row: row)  # another dataset, which the cache does not have
    assert packed_sequences(texts, tiny_tokenizer(), 16, documents_apart=True)[:] == alone[:]


def test_what_makes_no_sequence_is_refused():
    tokenizer = tiny_tokenizer()
    with pytest.raises(ValueError, match=r"has 2 tokens; expected at least one sequence of 1,000 tokens"):
        packed_sequences(rows(["w5"]), tokenizer, 1000, documents_apart=False)
    with pytest.raises(ValueError, match="embeds"):
        packed_sequences(rows(["w5 w6 w7"]), tokenizer, 4, documents_apart=False, vocab_size=6)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="the tokenizer has no EOS token, which ends every document"):
        packed_sequences(rows(["w5"]), tokenizer, 4, documents_apart=False)

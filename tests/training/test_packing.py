"""Documents become sequences of one length: nothing is lost but the remainder, and order is kept."""

import itertools

import pytest
import torch
from training.tiny_run import EOS_ID, document, refused, tiny_tokenizer

from midus_hf.documents import DocumentError
from midus_hf.training.data.packing import (
    CorpusTokens,
    PackedDataset,
    PackedSequence,
    PackedStream,
    pack,
    tokenise,
    training_example,
)

hypothesis = pytest.importorskip("hypothesis")
given, st = hypothesis.given, hypothesis.strategies


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=30), min_size=1, max_size=12), st.integers(2, 12))
def test_packing_keeps_tokens_in_order_marks_documents_and_restarts_positions(token_lists, length):
    row = list(itertools.chain(*token_lists))
    hypothesis.assume(len(row) >= length)
    sequences = list(pack(token_lists, length))
    begins = [index == 0 for tokens in token_lists for index in range(len(tokens))]
    whole = len(row) // length * length
    assert all(len(sequence.tokens) == length for sequence in sequences)
    assert [token for sequence in sequences for token in sequence.tokens.tolist()] == row[:whole]
    assert [mark for sequence in sequences for mark in sequence.starts.tolist()] == begins[:whole]
    for sequence in sequences:
        expected, position = [], 0
        for start in sequence.starts.tolist():
            position = 0 if start else position
            expected.append(position)
            position += 1
        assert training_example(sequence, document_mask=True)["position_ids"].tolist() == expected


def test_without_a_mask_every_token_is_a_label_and_with_one_the_first_of_a_document_is_none():
    sequence = PackedSequence(torch.tensor([5, 6, 7], dtype=torch.int32), torch.tensor([False, True, False]))
    plain, masked = (training_example(sequence, document_mask=mask) for mask in (False, True))
    assert set(plain) == {"input_ids", "labels"} and plain["input_ids"].dtype == torch.int64
    assert plain["input_ids"].tolist() == plain["labels"].tolist() == [5, 6, 7]
    assert (masked["labels"].tolist(), masked["position_ids"].tolist()) == ([5, -100, 7], [0, 0, 1])


def test_documents_are_tokenised_in_order_each_ending_in_one_eos():
    assert list(tokenise(["w5 w6", "w7", "w8 <eos>"], tiny_tokenizer())) == [[5, 6, EOS_ID], [7, EOS_ID], [8, EOS_ID]]
    texts = [document(3, seed) for seed in range(150)]
    expected = [[int(word[1:]) for word in text.split()] + [EOS_ID] for text in texts]
    assert list(tokenise(iter(texts), tiny_tokenizer())) == expected


def test_a_tokenizer_without_eos_and_an_id_that_the_model_does_not_embed_are_refused():
    with refused(r"the tokenizer has no EOS token, which ends every document; set eos_token"):
        list(tokenise(["w5"], tiny_tokenizer(eos_token=None)))
    with refused(r"yields id 100, but the model embeds 100 ids; use the tokenizer that"):
        list(tokenise(["w5 w100"], tiny_tokenizer(), vocab_size=100))


def test_a_stream_repeats_the_corpus_without_end():
    stream = PackedStream(lambda: tokenise(["w5 w6 w7", "w8"], tiny_tokenizer()), 2)
    heads = [example["input_ids"].tolist() for example in itertools.islice(stream, 7)]
    assert heads == [[5, 6], [7, 2], [8, 2], [5, 6], [7, 2], [8, 2], [5, 6]]


def test_a_stream_yields_what_a_dataset_holds():
    token_lists = list(tokenise([document(9, seed) for seed in range(5)], tiny_tokenizer()))
    dataset = PackedDataset(CorpusTokens.held(token_lists), 8, document_mask=True)
    assert (dataset.tokens.num_documents, dataset.tokens.num_tokens, len(dataset)) == (5, 50, 6)
    stream = PackedStream(lambda: token_lists, 8, document_mask=True)
    for held, streamed in zip(dataset, itertools.islice(stream, len(dataset)), strict=True):
        assert held.keys() == streamed.keys()
        assert all(torch.equal(held[key], streamed[key]) for key in held)


@pytest.mark.parametrize(
    ("token_lists", "message"),
    [
        ([], "the corpus is empty: it has no document with a visible character. Add text to it."),
        (
            [[5, 6, 2]],
            "has 3 tokens; expected at least one sequence of sequence_length = 4. Add text, or lower sequence_l",
        ),
    ],
)
def test_a_corpus_shorter_than_a_sequence_is_refused(token_lists, message):
    with refused(message, DocumentError):
        next(iter(PackedStream(lambda: token_lists, 4)))
    with refused(message, DocumentError):
        PackedDataset(CorpusTokens.held(token_lists), 4)

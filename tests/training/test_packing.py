"""Documents become sequences of one length: nothing is lost but the remainder, and order is kept."""

import itertools

import pytest
import torch
from training.tiny_run import EOS_ID, document, refused, tiny_tokenizer

from midus_hf.documents import DocumentError
from midus_hf.training.data.packing import (
    CorpusPass,
    PackedDataset,
    PackedSequence,
    PackedStream,
    pack,
    tokenise,
    training_example,
)

hypothesis = pytest.importorskip("hypothesis")
given, st = hypothesis.given, hypothesis.strategies

TOKEN_LISTS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=30), max_size=12)


@given(TOKEN_LISTS, st.integers(2, 12))
def test_packing_keeps_every_token_in_order_but_the_remainder(token_lists, length):
    sequences = list(pack(token_lists, length))
    row = list(itertools.chain(*token_lists))
    assert all(len(sequence.tokens) == length for sequence in sequences)
    packed = [token for sequence in sequences for token in sequence.tokens.tolist()]
    assert packed == row[: len(row) // length * length]


@given(TOKEN_LISTS, st.integers(2, 12))
def test_packing_marks_where_documents_begin(token_lists, length):
    begins = [index == 0 for tokens in token_lists for index in range(len(tokens))]
    marked = [mark for sequence in pack(token_lists, length) for mark in sequence.starts.tolist()]
    assert marked == begins[: len(marked)]


@given(TOKEN_LISTS, st.integers(2, 12))
def test_positions_count_up_within_each_document_of_a_sequence(token_lists, length):
    for sequence in pack(token_lists, length):
        example = training_example(sequence, document_mask=True)
        expected, position = [], 0
        for start in sequence.starts.tolist():
            position = 0 if start else position
            expected.append(position)
            position += 1
        assert example["position_ids"].tolist() == expected


def test_an_example_without_a_mask_is_one_context_with_every_token_a_label():
    sequence = PackedSequence(torch.tensor([5, 6, 7], dtype=torch.int32), torch.tensor([False, True, False]))
    example = training_example(sequence, document_mask=False)
    assert set(example) == {"input_ids", "labels"}
    assert example["input_ids"].dtype == torch.int64
    assert example["input_ids"].tolist() == example["labels"].tolist() == [5, 6, 7]


def test_with_a_mask_the_first_token_of_a_document_is_no_label():
    sequence = PackedSequence(torch.tensor([5, 6, 7], dtype=torch.int32), torch.tensor([False, True, False]))
    example = training_example(sequence, document_mask=True)
    assert example["labels"].tolist() == [5, -100, 7]
    assert example["position_ids"].tolist() == [0, 0, 1]


def test_every_document_ends_in_one_eos():
    assert list(tokenise(["w5 w6", "w7", "w8 <eos>"], tiny_tokenizer())) == [[5, 6, EOS_ID], [7, EOS_ID], [8, EOS_ID]]


def test_many_documents_are_tokenised_in_order():
    texts = [document(3, seed) for seed in range(150)]
    expected = [[int(word[1:]) for word in text.split()] + [EOS_ID] for text in texts]
    assert list(tokenise(iter(texts), tiny_tokenizer())) == expected


def test_a_tokenizer_without_eos_is_refused():
    with refused(r"the tokenizer has no EOS token, which ends every document; set eos_token"):
        list(tokenise(["w5"], tiny_tokenizer(eos_token=None)))


def test_an_id_that_the_model_does_not_embed_is_refused():
    with refused(r"yields id 100, but the model embeds 100 ids; use the tokenizer that"):
        list(tokenise(["w5 w100"], tiny_tokenizer(), vocab_size=100))


def test_a_dataset_counts_what_it_read():
    dataset = PackedDataset(CorpusPass(["w5 w6 w7", "w8"], tiny_tokenizer(), 4))
    assert (dataset.num_documents, dataset.num_tokens, len(dataset)) == (2, 6, 1)
    assert dataset[0]["input_ids"].tolist() == [5, 6, 7, EOS_ID]


def test_a_stream_repeats_the_corpus_without_end():
    stream = PackedStream(lambda: CorpusPass(["w5 w6 w7", "w8"], tiny_tokenizer(), 2))
    heads = [example["input_ids"].tolist() for example in itertools.islice(stream, 7)]
    assert heads == [[5, 6], [7, 2], [8, 2], [5, 6], [7, 2], [8, 2], [5, 6]]


def test_a_stream_yields_what_a_dataset_holds():
    texts = [document(9, seed) for seed in range(5)]
    dataset = PackedDataset(CorpusPass(texts, tiny_tokenizer(), 8), document_mask=True)
    stream = PackedStream(lambda: CorpusPass(texts, tiny_tokenizer(), 8), document_mask=True)
    for held, streamed in zip(dataset, itertools.islice(stream, len(dataset)), strict=True):
        assert held.keys() == streamed.keys()
        assert all(torch.equal(held[key], streamed[key]) for key in held)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "the corpus is empty: it has no document with a visible character. Add text to it."),
        (
            ["w5 w6"],
            "has 3 tokens; expected at least one sequence of sequence_length = 4. Add text, or lower sequence_l",
        ),
    ],
)
def test_a_corpus_shorter_than_a_sequence_is_refused(texts, message, streaming):
    def start_pass() -> CorpusPass:
        return CorpusPass(texts, tiny_tokenizer(), 4)

    with refused(message, DocumentError):
        next(iter(PackedStream(start_pass))) if streaming else PackedDataset(start_pass())

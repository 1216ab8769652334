"""Texts become rows, documents apart, and what a model loses on them is what it gives."""

import pytest
import torch
from tiny import tiny_model
from torch.nn import functional as F
from training.tiny_run import tiny_tokenizer

from midus_hf.look.text_rows import read_rows, text_rows


def words(*ids):
    return " ".join(f"w{id}" for id in ids)


def rows_as_lists(text):
    return sorted((number, row.tolist()) for number, row in zip(text.documents, text.rows, strict=True))


def test_documents_are_kept_apart_and_long_ones_are_cut():
    documents = [words(3, 4, 5, 6, 7, 8, 9), words(10, 11), words(12)]
    text = text_rows("text", documents, tiny_tokenizer(), sequence_length=3)
    assert rows_as_lists(text) == [(0, [3, 4, 5]), (0, [6, 7, 8]), (1, [10, 11])]
    assert [len(row) for row in text.rows] == [3, 3, 2]
    assert text.num_tokens == 8


def test_a_row_begins_with_the_token_that_the_tokenizer_writes():
    tokenizer = tiny_tokenizer(bos_token="<bos>")
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    text = text_rows("text", [words(3, 4, 5)], tokenizer, sequence_length=3)
    assert rows_as_lists(text) == [(0, [1, 3, 4]), (0, [1, 5])]


def test_rows_are_chosen_up_to_a_number_of_tokens_and_one_in_any_case():
    documents = [words(*range(first, first + 5)) for first in range(3, 103, 5)]
    text = text_rows("text", documents, tiny_tokenizer(), max_tokens=23)
    assert len(text.rows) == 4 and len(set(text.documents)) == 4
    assert text.documents == text_rows("text", documents, tiny_tokenizer(), max_tokens=23).documents
    assert sorted(text.documents) != [0, 1, 2, 3]
    assert len(text_rows("text", documents, tiny_tokenizer(), max_tokens=2).rows) == 1


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_losses_are_those_of_each_row_alone(batch_size):
    model = tiny_model("llama").train()
    text = text_rows("text", [words(3, 4, 5, 9), words(10, 11, 90), words(12, 60, 5)], tiny_tokenizer())
    seen = []
    losses = read_rows(model, text, batch_size=batch_size, progress=seen.append)
    assert model.training and sum(seen) == 10
    model.eval()
    for row, loss, tokens in zip(text.rows, losses.sums, losses.tokens, strict=True):
        with torch.no_grad():
            expected = F.cross_entropy(model(row[None]).logits[0, :-1], row[1:], reduction="sum")
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        assert tokens == len(row) - 1
    assert losses.mean == pytest.approx(losses.sums.sum().item() / 7)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sequence_length": 1}, r"sequence_length is 1; expected at least 2\."),
        ({"sequence_length": 9, "longest": 8}, r"sequence_length is 9; the model was made for at most 8 tokens\."),
        ({"max_tokens": 0}, r"max_tokens is 0; expected at least 1\."),
    ],
)
def test_options_out_of_range_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        text_rows("text", [words(3, 4)], tiny_tokenizer(), **given)


def test_a_text_without_a_token_to_predict_is_refused():
    with pytest.raises(ValueError, match=r"text 'text' has no document of two tokens; expected one to predict"):
        text_rows("text", [words(3)], tiny_tokenizer())


def test_a_broken_model_is_told():
    model = tiny_model("llama")
    model.lm_head.weight.data.fill_(torch.nan)
    with pytest.raises(RuntimeError, match=r"the loss of text 'text' is not a finite number"):
        read_rows(model, text_rows("text", [words(3, 4)], tiny_tokenizer()))

"""Documents are cut at ends of lines, and within a line where it alone is too long."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from retrieval.tiny_bert import tiny_tokenizer

from midus_hf.retrieval.passages import cut_into_passages

TOKENIZER = tiny_tokenizer()


def count(text: str) -> int:
    return len(TOKENIZER(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    "document, most, expected",
    [
        ("w1 w2\nw3\nw4 w5 w6\n", 3, ["w1 w2\nw3", "w4 w5 w6"]),
        ("w1 w2 w3 w4 w5\nw6\n", 2, ["w1 w2", "w3 w4", "w5\nw6"]),
        ("w1\n\n\nw2", 5, ["w1\n\n\nw2"]),
        ("\n \n", 5, []),
        ("", 5, []),
        ("w1 w2 w3 w4", 4, ["w1 w2 w3 w4"]),
    ],
    ids=["lines", "long-line", "whole", "blank", "empty", "just-as-long"],
)
def test_a_document_is_cut_at_ends_of_lines(document, most, expected):
    assert cut_into_passages([document], TOKENIZER, most) == expected


def test_no_passage_is_of_two_documents():
    assert cut_into_passages(["w1", "w2 w3", "w4"], TOKENIZER, 10) == ["w1", "w2 w3", "w4"]


LINES = st.lists(st.lists(st.sampled_from(["w1", "w22", "stranger", "w3,"]), max_size=6).map(" ".join), max_size=6)


@settings(max_examples=60, deadline=None)
@given(documents=st.lists(LINES.map("\n".join), max_size=3), most=st.integers(1, 5))
def test_passages_hold_every_word_in_order_and_no_more_tokens_than_allowed(documents, most):
    found = cut_into_passages(documents, TOKENIZER, most)
    assert all(passage == passage.strip() and 0 < count(passage) <= most for passage in found)
    words = [token for document in documents for token in TOKENIZER.tokenize(document)]
    assert [token for passage in found for token in TOKENIZER.tokenize(passage)] == words

"""Texts become rows that predict each token once; their losses; whether a text has an answer."""

import math
from contextlib import nullcontext

import pytest
import torch
from evaluation.byte_models import byte_model, byte_tokenizer, perplexity
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_model
from torch.nn import functional as F
from training.tiny_run import framing_tokenizer, refused, tiny_tokenizer

from midus_hf.evaluation.answers import has_answer, read_numbers
from midus_hf.evaluation.text_rows import row_losses, text_rows

CONFIG = tiny_model("llama").config


def words(*ids):
    return " ".join(f"w{id}" for id in ids)


def test_documents_are_kept_apart_and_long_ones_are_cut():
    documents = [words(3, 4, 5, 6, 7, 8), words(10, 11), words(12)]
    text = text_rows("text", documents, tiny_tokenizer(), CONFIG, sequence_length=3)
    rows = [(number, row.tolist()) for number, row in zip(text.documents, text.rows, strict=True)]
    assert rows == [(0, [3, 4, 5, 6]), (0, [6, 7, 8]), (1, [10, 11])]
    assert text.num_tokens == 6


FRAMES = {"$A <eos>": [], "<bos> $A": [1], "<bos> $A <eos>": [1], "<bos> <pad> $A": [1, 0]}


@pytest.mark.parametrize(("frame", "beginning"), FRAMES.items())
def test_rows_begin_as_packed_sequences_do(frame, beginning):
    tokenizer, model = framing_tokenizer(frame), tiny_model("llama").eval()
    documents = [words(3, 4, 5, 6, 7, 8), words(10, 11)]
    text = text_rows("text", documents, tokenizer, CONFIG, sequence_length=3)
    targets = [[3, 4, 5], [6, 7, 8], [10, 11]] if beginning else [[4, 5, 6], [7, 8], [11]]
    before = [beginning] * 3 if beginning else [[3], [6], [10]]
    assert [row.tolist() for row in text.rows] == [[*lead, *row] for lead, row in zip(before, targets, strict=True)]
    assert (text.lead, text.num_tokens) == (max(1, len(beginning)), sum(map(len, targets)))
    losses = row_losses(model, text, batch_size=2)
    for row, loss in zip(text.rows, losses.sums, strict=True):
        logits = model(row[None]).logits[0, text.lead - 1 : -1]
        expected = F.cross_entropy(logits, row[text.lead :], reduction="sum")
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    with refused("sequence_length is 128; .* for at most 127") if len(beginning) > 1 else nullcontext():
        text_rows("text", documents, tokenizer, CONFIG, sequence_length=128)


@given(
    documents=st.lists(st.text(st.characters(codec="utf-8"), min_size=2, max_size=30), min_size=1, max_size=3),
    sequence_length=st.integers(1, 8),
    joined=st.booleans(),
)
def test_rows_know_how_many_bytes_of_the_text_they_predict(documents, sequence_length, joined):
    """Also where a row ends within a character, which here has a token per byte."""
    options = {"sequence_length": sequence_length, "joined": joined}
    text = text_rows("text", documents, byte_tokenizer(writes_bos=True), CONFIG, **options)
    whole = "\n\n".join(documents) if joined else "".join(documents)
    assert sum(text.num_bytes) == len(whole.encode()) == text.num_tokens
    assert sum(sum(part.num_bytes) for part in text.batches(2)) == sum(text.num_bytes)
    without = text_rows("text", documents, byte_tokenizer(), CONFIG, **options)
    assert without.tokens_sha256 == text.tokens_sha256
    assert sum(without.num_bytes) <= sum(text.num_bytes) - (1 if joined else len(documents))


@given(length=st.integers(1, 60), sequence_length=st.integers(1, 20), data=st.data())
def test_every_token_is_predicted_once_or_max_tokens_of_them(length, sequence_length, data):
    max_tokens, text = data.draw(st.integers(1, length)), [chr(97 + number % 26) for number in range(length + 1)]
    options = {"sequence_length": sequence_length, "joined": True}
    every = text_rows("text", ["".join(text)], byte_tokenizer(), CONFIG, **options)
    some = text_rows("text", ["".join(text)], byte_tokenizer(), CONFIG, max_tokens=max_tokens, **options)
    targets = [token for row in every.rows for token in row[1:].tolist()]
    assert targets == byte_tokenizer()("".join(text), add_special_tokens=False).input_ids[1:]
    assert all(len(row) - 1 <= sequence_length for row in every.rows)
    assert len(some.rows) == 1 or some.num_tokens <= max_tokens
    assert len(some.rows) >= min(len(every.rows), max_tokens // sequence_length)


def test_batch_without_rows_is_refused():
    text = text_rows("text", [words(3, 4, 5)], tiny_tokenizer(), CONFIG)
    with pytest.raises(ValueError, match="batch_size is 0; expected 1 or more rows"):
        row_losses(tiny_model("llama"), text, batch_size=0)


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_losses_are_those_of_single_rows(batch_size):
    model = tiny_model("llama", attention_dropout=0.5).train()
    documents = [words(3, 4, 5, 9), words(10, 11, 90), words(12, 60, 5)]
    text = text_rows("text", documents, tiny_tokenizer(), CONFIG)
    losses = row_losses(model, text, batch_size=batch_size)
    assert model.training
    model.eval()
    for row, loss, tokens in zip(text.rows, losses.sums, losses.tokens, strict=True):
        expected = F.cross_entropy(model(row[None]).logits[0, :-1], row[1:], reduction="sum")
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        assert tokens == len(row) - 1
    assert losses.mean == pytest.approx(losses.sums.sum().item() / 7)


@pytest.mark.parametrize(("options", "message"), [
    ({"sequence_length": 0}, r"sequence_length is 0; expected at least 1\."),
    ({"sequence_length": 129}, r"sequence_length is 129; the model was made for at most 128 tokens\."),
    ({"max_tokens": 0}, r"max_tokens is 0; expected at least 1\."),
    ({"documents": []}, r"text 'text' has 0 tokens to predict; expected at least 1\. Give more text\."),
    ({"documents": [words(3)]}, r"text 'text' has 0 tokens to predict"),
])  # fmt: skip
def test_wrong_length_or_short_text_is_refused(options, message):
    with refused(message):
        text_rows("text", options.pop("documents", [words(3, 4)]), tiny_tokenizer(), CONFIG, **options)


DOCUMENTS = ["The first document.", "A second one, with ünïcödé: 猫.", "And a third."]


def token_by_token(model, tokenizer, documents, sequence_length) -> tuple[float, int]:
    """Mean negative log-likelihood and number of tokens: one forward pass a token, everything in float64."""
    ids = []
    for document in documents[:-1]:
        ids += tokenizer(document + "\n\n", add_special_tokens=False).input_ids
    ids += tokenizer(documents[-1], add_special_tokens=False).input_ids
    writes_bos, total, count = tokenizer("x").input_ids[0] == tokenizer.bos_token_id, 0.0, 0
    first = 0 if writes_bos else 1
    for target in range(first, len(ids)):
        window_start = first + (target - first) // sequence_length * sequence_length
        before = [tokenizer.bos_token_id] if writes_bos else [ids[window_start - 1]]
        context = torch.tensor([before + ids[window_start:target]])
        logits = model(context).logits[0, -1].double()
        total -= torch.log_softmax(logits, dim=-1)[ids[target]].item()
        count += 1
    return total / count, count


@pytest.mark.parametrize("writes_bos", [False, True], ids=["without-bos", "with-bos"])
def test_perplexity_equals_a_loop_over_tokens_in_float64(family, writes_bos):
    model, tokenizer = byte_model(family).double(), byte_tokenizer(writes_bos=writes_bos)
    result = perplexity(model, tokenizer, DOCUMENTS, sequence_length=24, batch_size=3)
    loss, count = token_by_token(model, tokenizer, DOCUMENTS, 24)
    assert result.tokens == count
    # Norms and rotary angles are computed in float32 whatever the weights are.
    assert math.log(result.perplexity) == pytest.approx(loss, rel=1e-6)


def test_losses_of_a_model_in_bfloat16_are_computed_in_float32():
    model = byte_model("llama").eval().to(torch.bfloat16)
    text = text_rows("text", DOCUMENTS[:1], byte_tokenizer(), CONFIG)
    logits = model(text.rows[0][None]).logits[0, :-1].float()
    expected = F.cross_entropy(logits, text.rows[0][1:])
    assert row_losses(model, text).mean == pytest.approx(expected.item(), rel=1e-6)


def test_default_window_is_what_the_model_was_made_for():
    result = perplexity(byte_model("llama"), byte_tokenizer(), ["word " * 100])
    assert (result.sequence_length, result.tokens) == (128, 499)


# Texts, and answers that they have.
FOUND = [
    ("青隼网关由北仓团队维护。", "北仓团队"), ("ｶﾞｲﾄﾞです", "ガイド"), ("เมืองหลวงคือกรุงเทพมหานคร", "กรุงเทพ"), ("由abc维护", "abc"),
    ("수도는 서울입니다.", "서울"), ("Merlin은 무엇인가?", "Merlin"),  # particles
    ("端口8443\uff0c由", "8443"), ("포트 8443을 사용한다", "8443"), ("พอร์ต๘๔๔๓ค่ะ", "8443"), ("気温は-5度", "-5"),
    ("\uff13\uff0e\uff11\uff14です", "3.14"), ("\u0663\u066b\u0661\u0664", "3.14"),
    ("the STORAGE team", "Storage team"), ("Wim's", "wim"), ("l\u2019Ankara", "Ankara"), ("**Paris** and _Rome_", "rome"),
    ("Rome.The", "Rome"), ("Kyiv--the capital", "Kyiv"), ("St. Helier", "St Helier"), ("e\u0301t\u00e9", "été"),
    ("Straße", "STRASSE"), ("Kyi\u00adv\u200b\u00a0Oblast", "Kyiv Oblast"),
    ("1,000 people", "1000"), ("1000", "1,000"), ("12,34,567", "1234567"), ("1.234.567", "1234567"), ("1.000,5", "1000.5"),
    ("1'000", "1000"), ("1_000", "1000"), ("1\u202f000 km", "1000"), ("3,14", "3.14"), ("0,125", "0.125"), ("1.0", "1"),
    (".5", "0.5"), ("1e-06", "0.000001"), ("\u22125 °C", "-5"), ("-$5", "-5"), ("$5", "5"), ("5%", "5"), ("5th", "5"),
    ("3-5", "5"), ("COVID-19", "19"), ("80,443,8443", "443"), ("1,000kg", "1000kg"), ("10.0.0.1:8443", "8443"),
    ("at 10.0.0.1", "10.0.0.1"), ("agent 007", "007"),
    ("C++!", "c++"), ("C++17", "C++"), ("C/C++", "C"), ("ASP.NET", ".NET"), ("C#.", "C#"), ("A-, B", "A-"),
]  # fmt: skip
NOT_FOUND = [
    ("Annapolis", "Ann"), ("storages", "storage"), ("merlin_cache", "cache"), ("병원", "원"), ("กุ", "ก"), ("e\u0301", "e"),
    ("H2O", "2"), ("18443", "8443"), ("8443.5", "8443"), ("8,443", "443"), ("1,000 people", "1"), ("1,000 people", "0"),
    ("3.14", "3"), ("1,5", "5"), ("3.11.2", "3.11"), ("1.5GB", "5GB"), ("v1.5", "v1"), ("v1.5", "5"), ("10²", "10"),
    ("5万人", "5"), ("1e-6", "6"), ("1.0", "10"), ("3.14", "314"), ("-5", "5"), ("\u22125", "5"), ("-$5", "5"), ("5", "-5"),
    ("3-1", "31"), ("007", "7"), ("1" + 30 * "0" + "1", "1" + 30 * "0" + "2"),
    ("C++", "C"), ("C#", "C"), (".NET", "NET"), ("A-", "A"), ("Na+ ions", "Na"), ("m²", "m"), ("text", ""), ("text", "\u200b"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "answer"), FOUND + NOT_FOUND)
def test_text_has_an_answer(text, answer):
    assert has_answer(text, answer) == ((text, answer) in FOUND)


@pytest.mark.parametrize(("text", "answer", "starts", "is_whole"), [
    ("Saint Helier in Jersey", "Saint Helier", True, False),
    (' "the Saint Helier".', "saint helier", True, True),
    ("Hague", "The Hague", False, True),
    ("in Saint Helier", "Saint Helier", False, False),
    ("Grade A.", "A", False, False),
    ("A.", "A", True, True),
    ("1,000 people", "1000", True, False),
    ("北京市", "北京", True, False),
    ("Kyiv!", "Kyiv.", True, True),
])  # fmt: skip
def test_place_restricts_where_an_answer_is_found(text, answer, starts, is_whole):
    assert has_answer(text, answer, "start") == starts
    assert has_answer(text, answer, "whole") == is_whole


def test_case_counts_if_asked():
    assert has_answer(" na", "Na", "start")
    assert not has_answer(" na", "Na", "start", match_case=True)
    assert has_answer("1E3 Na", "Na", match_case=True)
    assert has_answer("1E3", "1000", match_case=True)


def test_numbers_are_read_in_order_of_the_text():
    text = "the 11th of 12, 1,000.5 kg, -7, not 10.0.0.1, 007, v2 or 5万, but 80,443,8443 and 3km"
    assert [*map(float, read_numbers(text))] == [11, 12, 1000.5, -7, 80, 443, 8443, 3]

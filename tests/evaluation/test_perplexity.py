"""Perplexity: what is counted, from which context, and that it is right."""

import itertools
import math

import pytest
import torch
from evaluation.byte_models import VOCABULARY_SIZE, byte_model, byte_tokenizer, save_byte_model, save_upscaled
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers
from transformers import AutoModelForCausalLM

from midus_hf.evaluation import perplexity
from midus_hf.evaluation.perplexity import _spread, _windows, automatic_bos

DOCUMENTS = ["The first document.", "A second one, with ünïcödé: 猫.", "And a third."]


def token_by_token(model, tokenizer, documents, sequence_length, stride) -> tuple[float, int]:
    """Mean negative log-likelihood and number of tokens: one forward pass a token, everything in float64."""
    ids = []
    for document in documents[:-1]:
        ids += tokenizer(document + "\n\n", add_special_tokens=False).input_ids
    ids += tokenizer(documents[-1], add_special_tokens=False).input_ids
    writes_bos = tokenizer("x").input_ids[0] == tokenizer.bos_token_id
    total, count = 0.0, 0
    first = 0 if writes_bos else 1
    for target in range(first, len(ids)):
        window_end = first + ((target - first) // stride + 1) * stride
        window_start = max(first, window_end - sequence_length)
        before = [tokenizer.bos_token_id] if writes_bos else [ids[window_start - 1]]
        context = torch.tensor([before + ids[window_start:target]])
        with torch.no_grad():
            logits = model(context).logits[0, -1].double()
        total -= torch.log_softmax(logits, dim=-1)[ids[target]].item()
        count += 1
    return total / count, count


@pytest.mark.parametrize("writes_bos", [False, True], ids=["without-bos", "with-bos"])
@pytest.mark.parametrize("stride", [None, 7], ids=["windows-side-by-side", "windows-overlap"])
def test_it_equals_a_loop_over_tokens_in_float64(family, writes_bos, stride):
    model = byte_model(family).double()
    tokenizer = byte_tokenizer(writes_bos=writes_bos)
    result = perplexity(model, tokenizer, DOCUMENTS, sequence_length=24, stride=stride, batch_size=3)
    loss, count = token_by_token(model, tokenizer, DOCUMENTS, 24, stride or 24)
    assert result.tokens == count
    # Norms and rotary angles are computed in float32 whatever the weights are.
    assert math.log(result.perplexity) == pytest.approx(loss, rel=1e-6)


def test_memory_with_zero_values_leaves_every_measure_as_it_is(family, tmp_path):
    base = save_byte_model(family, tmp_path / "base")
    upscaled = save_upscaled(base, tmp_path / "upscaled")
    results = [
        perplexity(AutoModelForCausalLM.from_pretrained(folder), byte_tokenizer(), DOCUMENTS, sequence_length=24)
        for folder in (base, upscaled)
    ]
    assert results[0].perplexity == results[1].perplexity
    assert results[0].bits_per_byte == results[1].bits_per_byte


def test_the_same_call_gives_the_same_result(family):
    model, tokenizer = byte_model(family), byte_tokenizer()
    first, second = (perplexity(model, tokenizer, DOCUMENTS, sequence_length=16) for _ in range(2))
    assert first.perplexity == second.perplexity


@pytest.mark.parametrize("batch_size", [2, 3, 100])
def test_the_batch_size_changes_nothing_but_rounding(family, batch_size):
    model, tokenizer = byte_model(family).double(), byte_tokenizer()
    alone = perplexity(model, tokenizer, DOCUMENTS, sequence_length=16, stride=5, batch_size=1)
    together = perplexity(model, tokenizer, DOCUMENTS, sequence_length=16, stride=5, batch_size=batch_size)
    assert together.tokens == alone.tokens
    assert together.perplexity == pytest.approx(alone.perplexity, rel=1e-6)


def test_max_tokens_limits_what_is_predicted():
    model, tokenizer = byte_model("llama"), byte_tokenizer()
    assert perplexity(model, tokenizer, DOCUMENTS, sequence_length=16, max_tokens=40).tokens == 32


def test_a_uniform_model_needs_the_logarithm_of_its_vocabulary_for_every_byte():
    model, tokenizer = byte_model("llama"), byte_tokenizer(writes_bos=True)
    torch.nn.init.zeros_(model.lm_head.weight)
    text = "猫 and ü\n"
    result = perplexity(model, tokenizer, [text, text], sequence_length=8)
    assert result.perplexity == pytest.approx(VOCABULARY_SIZE, rel=1e-6)
    assert result.tokens == 2 * len(text.encode()) + 2
    assert result.bits_per_byte == pytest.approx(math.log2(VOCABULARY_SIZE), rel=1e-6)
    bits = result.tokens * math.log2(VOCABULARY_SIZE)
    assert result.bits_per_character == pytest.approx(bits / (2 * len(text) + 2), rel=1e-6)


def test_bits_are_counted_over_the_predicted_part_of_the_text_alone():
    model, tokenizer = byte_model("llama"), byte_tokenizer()
    torch.nn.init.zeros_(model.lm_head.weight)
    result = perplexity(model, tokenizer, ["猫" * 30], sequence_length=6, max_tokens=12)
    assert result.tokens == 12
    assert result.bits_per_byte == pytest.approx(math.log2(VOCABULARY_SIZE), rel=1e-1)


def test_low_precision_weights_are_summed_in_high_precision():
    model, tokenizer = byte_model("llama"), byte_tokenizer()
    exact = perplexity(model, tokenizer, DOCUMENTS, sequence_length=16)
    rounded = perplexity(model.to(torch.bfloat16), tokenizer, DOCUMENTS, sequence_length=16)
    assert rounded.perplexity != exact.perplexity
    assert rounded.perplexity == pytest.approx(exact.perplexity, rel=0.05)


def test_the_default_window_is_what_the_model_was_made_for():
    result = perplexity(byte_model("llama"), byte_tokenizer(), ["word " * 100])
    assert (result.sequence_length, result.stride, result.tokens) == (128, 128, 499)


def test_the_model_is_measured_in_eval_mode_and_given_back_as_it_was():
    model, tokenizer = byte_model("llama", attention_dropout=0.5), byte_tokenizer()
    in_eval_mode = perplexity(model.eval(), tokenizer, DOCUMENTS, sequence_length=16)
    in_training = perplexity(model.train(), tokenizer, DOCUMENTS, sequence_length=16)
    assert in_training.perplexity == in_eval_mode.perplexity
    assert model.training


def test_progress_ends_at_the_number_of_tokens():
    seen = []
    result = perplexity(
        byte_model("llama"), byte_tokenizer(), DOCUMENTS, sequence_length=16, progress=lambda *done: seen.append(done)
    )
    assert seen[-1] == (result.tokens, result.tokens)
    assert seen == sorted(seen)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_length": 0}, "sequence_length is 0; expected at least 1"),
        ({"sequence_length": 129}, "sequence_length is 129; the model was made for at most 128 tokens"),
        ({"sequence_length": 16, "stride": 0}, "stride is 0; expected 1 <= stride <= sequence_length = 16"),
        ({"sequence_length": 16, "stride": 17}, "stride is 17; expected 1 <= stride <= sequence_length = 16"),
        (
            {"sequence_length": 16, "max_tokens": 15},
            "max_tokens is 15; expected at least one window of 16 tokens, or a smaller",
        ),
        ({"sequence_length": 16, "batch_size": 0}, "batch_size is 0; expected at least 1"),
        ({"sequence_length": 100}, r"the text has 70 tokens to predict; expected at least sequence_length = 100"),
    ],
)
def test_a_wrong_request_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        perplexity(byte_model("llama"), byte_tokenizer(), DOCUMENTS, **options)


def test_no_documents_are_a_text_that_is_too_short():
    with pytest.raises(ValueError, match="the text has 0 tokens to predict"):
        perplexity(byte_model("llama"), byte_tokenizer(), [], sequence_length=16)


def test_a_tokenizer_without_offsets_is_refused():
    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match="the tokenizer is a Slow; expected a fast one"):
        perplexity(byte_model("llama"), Slow(), DOCUMENTS, sequence_length=16)


@pytest.mark.parametrize("writes_bos", [False, True])
def test_a_tokenizer_may_have_nothing_for_the_letter_that_it_is_asked_about(writes_bos):
    tokenizer = byte_tokenizer(writes_bos=writes_bos)
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("a", "")
    assert automatic_bos(tokenizer) == (1 if writes_bos else None)


def test_broken_weights_are_an_error_and_no_number():
    model = byte_model("llama")
    model.lm_head.weight.data[5] = float("nan")
    with pytest.raises(RuntimeError, match="the perplexity is nan; expected a finite number"):
        perplexity(model, byte_tokenizer(), DOCUMENTS, sequence_length=16)


@given(num_targets=st.integers(1, 400), sequence_length=st.integers(1, 50), data=st.data())
def test_every_token_is_counted_once_from_no_more_than_a_window(num_targets, sequence_length, data):
    stride = data.draw(st.integers(1, sequence_length))
    windows = _windows(num_targets, sequence_length, stride)
    counted = [target for window in windows for target in range(window.first, window.end)]
    assert counted == list(range(num_targets))
    assert all(0 <= window.start <= window.first < window.end for window in windows)
    assert all(window.end - window.start <= sequence_length for window in windows)


@given(num_targets=st.integers(10, 400), stride=st.integers(1, 10), data=st.data())
def test_max_tokens_keeps_whole_windows_from_all_over_the_text(num_targets, stride, data):
    every = _windows(num_targets, stride, stride)
    max_tokens = data.draw(st.integers(stride, num_targets))
    kept = _spread(every, stride, max_tokens)
    assert sum(window.end - window.first for window in kept) <= max_tokens
    assert len(kept) == min(len(every), max_tokens // stride)
    places = [*map(every.index, kept), len(every)]
    gaps = [after - before for before, after in itertools.pairwise(places)]
    assert places[0] == 0
    assert min(gaps) >= 1
    assert max(gaps) - min(gaps) <= 1

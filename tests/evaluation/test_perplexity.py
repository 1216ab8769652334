"""Perplexity: what is counted, from which context, and that it is right."""

import math

import pytest
import torch
from evaluation.byte_models import VOCABULARY_SIZE, byte_model, byte_tokenizer
from evaluation.measured import perplexity

DOCUMENTS = ["The first document.", "A second one, with ünïcödé: 猫.", "And a third."]


def token_by_token(model, tokenizer, documents, sequence_length) -> tuple[float, int]:
    """Mean negative log-likelihood and number of tokens: one forward pass a token, everything in float64."""
    ids = []
    for document in documents[:-1]:
        ids += tokenizer(document + "\n\n", add_special_tokens=False).input_ids
    ids += tokenizer(documents[-1], add_special_tokens=False).input_ids
    writes_bos = tokenizer("x").input_ids[0] == tokenizer.bos_token_id
    total, count = 0.0, 0
    first = 0 if writes_bos else 1
    for target in range(first, len(ids)):
        window_start = first + (target - first) // sequence_length * sequence_length
        before = [tokenizer.bos_token_id] if writes_bos else [ids[window_start - 1]]
        context = torch.tensor([before + ids[window_start:target]])
        with torch.no_grad():
            logits = model(context).logits[0, -1].double()
        total -= torch.log_softmax(logits, dim=-1)[ids[target]].item()
        count += 1
    return total / count, count


@pytest.mark.parametrize("writes_bos", [False, True], ids=["without-bos", "with-bos"])
def test_it_equals_a_loop_over_tokens_in_float64(family, writes_bos):
    model = byte_model(family).double()
    tokenizer = byte_tokenizer(writes_bos=writes_bos)
    result = perplexity(model, tokenizer, DOCUMENTS, sequence_length=24, batch_size=3)
    loss, count = token_by_token(model, tokenizer, DOCUMENTS, 24)
    assert result.tokens == count
    # Norms and rotary angles are computed in float32 whatever the weights are.
    assert math.log(result.perplexity) == pytest.approx(loss, rel=1e-6)


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary():
    model, tokenizer = byte_model("llama"), byte_tokenizer(writes_bos=True)
    torch.nn.init.zeros_(model.lm_head.weight)
    text = "猫 and ü\n"
    result = perplexity(model, tokenizer, [text, text], sequence_length=8)
    assert result.perplexity == pytest.approx(VOCABULARY_SIZE, rel=1e-6)
    assert result.tokens == 2 * len(text.encode()) + 2


def test_low_precision_weights_are_summed_in_high_precision():
    model, tokenizer = byte_model("llama"), byte_tokenizer()
    exact = perplexity(model, tokenizer, DOCUMENTS, sequence_length=16)
    rounded = perplexity(model.to(torch.bfloat16), tokenizer, DOCUMENTS, sequence_length=16)
    assert rounded.perplexity != exact.perplexity
    assert rounded.perplexity == pytest.approx(exact.perplexity, rel=0.05)


def test_the_default_window_is_what_the_model_was_made_for():
    result = perplexity(byte_model("llama"), byte_tokenizer(), ["word " * 100])
    assert (result.sequence_length, result.tokens) == (128, 499)

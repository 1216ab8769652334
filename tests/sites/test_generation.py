"""Generation with memories that act: every cache gives the same tokens."""

import pytest
import torch
from sites.cases import MOST, SOME, each
from tiny import WINDOW, prompt
from transformers import DynamicCache, StaticCache

GREEDY = {"max_new_tokens": WINDOW, "do_sample": False}


@pytest.mark.parametrize("other", [{"use_cache": False}, {"cache_implementation": "static"}], ids=["none", "static"])
@each(MOST)
def test_greedy_tokens_do_not_depend_on_the_cache(case, family, other, toy_model):
    model = toy_model(case, family)
    dynamic = model.generate(prompt(), **GREEDY)
    assert dynamic.shape == (2, 4 * WINDOW)
    assert torch.equal(dynamic, model.generate(prompt(), **GREEDY, **other))


@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
@each(SOME)
def test_a_prompt_in_steps_through_a_cache_gives_the_logits_of_one_pass(case, family, cache_class, toy_model):
    model = toy_model(case, family)
    tokens, position, outputs = prompt(), 0, []
    cache = (
        DynamicCache(config=model.config)
        if cache_class is DynamicCache
        else StaticCache(model.config, max_cache_len=tokens.shape[1])
    )
    with torch.no_grad():
        for step in (10, 5, *[1] * (tokens.shape[1] - 15)):
            part = tokens[:, position : position + step]
            outputs.append(model(part, past_key_values=cache, use_cache=True).logits)
            position += step
        torch.testing.assert_close(torch.cat(outputs, dim=1), model(tokens).logits, rtol=1e-4, atol=1e-4)

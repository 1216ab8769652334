"""Models whose memories fetch blocks generate as whole passes do, each row with its own blocks."""

import pytest
import torch
from models.hierarchical_models import (
    FOUR_TOKENS,
    IDS,
    KINDS,
    hierarchical_model,
    logits,
)
from tiny import prompt


def greedily(model, tokens, steps=4, **given):
    """By a pass over all tokens for each that is added."""
    for _ in range(steps):
        last = logits(model, tokens, **given)[:, -1]
        tokens = torch.cat([tokens, last.argmax(-1, keepdim=True)], dim=1)
    return tokens


@pytest.mark.parametrize("kind", KINDS)
def test_generation_continues_as_whole_passes_do(native_family, kind, tmp_path):
    model, tokens = hierarchical_model(native_family, kind, tmp_path), prompt(9)
    expected = greedily(model, tokens, memory_ids=IDS)
    assert not torch.equal(expected, greedily(model, tokens))
    for given in (
        {"memory_ids": IDS},
        {"memory_ids": IDS, "use_cache": False},
        {"memory_blocks": model.fetch_memory(IDS)},
        {"memory_ids": IDS, "cache_implementation": "static"},
    ):
        assert torch.equal(model.generate(tokens, **FOUR_TOKENS, **given), expected), given.keys()
    assert torch.equal(model.generate(tokens, **FOUR_TOKENS), greedily(model, tokens))


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_one_by_one_have_the_logits_of_one_pass(native_family, kind, tmp_path):
    model, tokens = hierarchical_model(native_family, kind, tmp_path), prompt(10)
    cache, steps = None, []
    for position in range(10):
        with torch.no_grad():
            output = model(tokens[:, position : position + 1], past_key_values=cache, use_cache=True, memory_ids=IDS)
        cache = output.past_key_values
        steps.append(output.logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), logits(model, tokens, memory_ids=IDS))


@pytest.mark.parametrize("kind", KINDS)
def test_beams_and_samples_keep_the_blocks_of_their_row(native_family, kind, tmp_path):
    model, tokens = hierarchical_model(native_family, kind, tmp_path), prompt(6)
    beams = model.generate(tokens, memory_ids=IDS, num_beams=3, num_return_sequences=2, **FOUR_TOKENS)
    for row in range(2):
        alone = model.generate(
            tokens[row : row + 1], memory_ids=IDS[row : row + 1], num_beams=3, num_return_sequences=2, **FOUR_TOKENS
        )
        assert torch.equal(beams[2 * row : 2 * row + 2], alone)
    torch.manual_seed(0)
    settings = {**FOUR_TOKENS, "do_sample": True, "top_k": 1}
    sampled = model.generate(tokens, memory_ids=IDS, num_return_sequences=3, **settings)
    assert torch.equal(sampled, greedily(model, tokens, memory_ids=IDS).repeat_interleave(3, 0))


@pytest.mark.parametrize("kind", KINDS)
def test_padding_on_the_left_changes_nothing(native_family, kind, tmp_path):
    # In float64 the eager attention of Gemma-2 itself gives NaN for rows that are padding alone.
    model, tokens = hierarchical_model(native_family, kind, tmp_path, torch.float32), prompt(6)
    alone = model.generate(tokens, memory_ids=IDS, **FOUR_TOKENS)
    padded, mask = (torch.nn.functional.pad(part, (3, 0)) for part in (tokens, torch.ones_like(tokens)))
    assert torch.equal(model.generate(padded, attention_mask=mask, memory_ids=IDS, **FOUR_TOKENS)[:, 3:], alone)

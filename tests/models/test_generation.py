"""Generation with blocks that act: every cache and every way through a sequence gives the same tokens."""

import pytest
import torch
from models.upscaled import upscaled_model, upscaled_pair
from tiny import WINDOW, prompt
from transformers import DynamicCache, PreTrainedModel, StaticCache

GREEDY = {"max_new_tokens": 2 * WINDOW, "do_sample": False}


def test_the_memories_change_what_these_models_compute(family):
    base, model = upscaled_pair(family)
    with torch.no_grad():
        difference = (base(prompt()).logits - model(prompt()).logits).abs().max()
    assert difference > 0.1 * base(prompt()).logits.abs().max()


@pytest.mark.parametrize("other", [{"use_cache": False}, {"cache_implementation": "static"}], ids=["none", "static"])
def test_greedy_tokens_do_not_depend_on_the_cache(family, other):
    model = upscaled_model(family)
    dynamic = model.generate(prompt(), **GREEDY)
    assert dynamic.shape == (2, 5 * WINDOW)
    assert torch.equal(dynamic, model.generate(prompt(), **GREEDY, **other))


def test_a_block_in_front_of_every_layer_keeps_its_place_in_the_cache(family):
    model = upscaled_model(family, new_layers=(0, 1, 3, 5, 6))
    dynamic = model.generate(prompt(), **GREEDY)
    assert torch.equal(dynamic, model.generate(prompt(), **GREEDY, use_cache=False))
    assert torch.equal(dynamic, model.generate(prompt(), **GREEDY, cache_implementation="static"))


def test_every_layer_fills_its_own_slot_of_the_cache(family):
    model = upscaled_model(family)
    with torch.no_grad():
        cache = model(prompt(), use_cache=True).past_key_values
    assert len(cache.layers) == model.config.num_hidden_layers
    assert all(layer.keys.abs().sum() > 0 for layer in cache.layers)
    assert cache.get_seq_length() == 3 * WINDOW


def test_sliding_layers_are_those_of_the_base_with_the_blocks_as_their_donors(family):
    base, model = upscaled_pair(family)
    base_cache, cache = DynamicCache(config=base.config), DynamicCache(config=model.config)
    kinds = [type(layer) for layer in base_cache.layers]
    assert [type(layer) for layer in cache.layers] == [kinds[0], kinds[1], kinds[1], kinds[2], kinds[3], kinds[3]]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_left_padded_batch_gives_the_tokens_of_its_rows_alone(family, cache):
    model = upscaled_model(family)
    rows = [prompt(length, batch=1, seed=length) for length in (3 * WINDOW, WINDOW + 3, 2)]
    longest = max(row.shape[1] for row in rows)
    pads = [longest - row.shape[1] for row in rows]
    padded = torch.cat([torch.nn.functional.pad(row, (pad, 0)) for row, pad in zip(rows, pads, strict=True)])
    mask = torch.stack([(torch.arange(longest) >= pad).long() for pad in pads])
    together = model.generate(padded, attention_mask=mask, **GREEDY, cache_implementation=cache)
    for row, tokens in zip(rows, together, strict=True):
        alone = model.generate(row, attention_mask=torch.ones_like(row), **GREEDY)
        assert torch.equal(tokens[longest:], alone[0, row.shape[1] :])


def test_beam_search_does_not_depend_on_the_cache(family):
    model = upscaled_model(family)
    beams = {"num_beams": 3, "num_return_sequences": 2, "output_scores": True, "return_dict_in_generate": True}
    cached = model.generate(prompt(), **GREEDY, **beams)
    plain = model.generate(prompt(), **GREEDY, **beams, use_cache=False)
    assert cached.sequences.shape == (4, 5 * WINDOW)
    assert torch.equal(cached.sequences, plain.sequences)
    torch.testing.assert_close(cached.sequences_scores, plain.sequences_scores)


def error_of_steps(model: PreTrainedModel, cache, steps: list[int]) -> float:
    """Largest difference between one forward over a prompt and the same prompt fed in steps through a cache."""
    tokens = prompt(sum(steps))
    position, outputs = 0, []
    with torch.no_grad():
        for step in steps:
            outputs.append(model(tokens[:, position : position + step], past_key_values=cache, use_cache=True).logits)
            position += step
        return (torch.cat(outputs, dim=1) - model(tokens, use_cache=False).logits).abs().max().item()


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("steps", [[10, 5] + [1] * 9, [3, 1, 12, 1, 1, 6], [1] * 24], ids=str)
def test_prefill_in_chunks_then_single_tokens_is_one_forward_as_exactly_as_in_the_base(family, steps, static):
    base, model = upscaled_pair(family)
    errors = []
    for each in (base, model):
        cache = StaticCache(each.config, max_cache_len=sum(steps)) if static else DynamicCache(config=each.config)
        errors.append(error_of_steps(each, cache, steps))
    # Attention over other shapes rounds otherwise, in the base as well: a few units in the last place, never more.
    assert errors[1] <= 4 * max(errors[0], torch.finfo(torch.float32).eps)


def test_later_tokens_do_not_change_earlier_logits(family):
    model = upscaled_model(family)
    tokens = prompt()
    changed = tokens.clone()
    changed[:, WINDOW:] = prompt(2 * WINDOW, seed=9)
    with torch.no_grad():
        before, after = model(tokens).logits, model(changed).logits
    assert torch.equal(before[:, :WINDOW], after[:, :WINDOW])
    assert not torch.equal(before[:, WINDOW:], after[:, WINDOW:])

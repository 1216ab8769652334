"""Heads that read the depth, in generation: what a token reads of it is of its own position, so that no cache changes it."""

import pytest
import torch
from models.depth_models import KINDS, depth_model, logits
from tiny import WINDOW, prompt, tiny_model
from transformers import DynamicCache, StaticCache

GREEDY = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
"""Norms and rotations are in float32, whatever the model is in."""


def by_full_passes(model, tokens, steps=6):
    for _ in range(steps):
        tokens = torch.cat([tokens, logits(model, tokens)[:, -1].argmax(-1, keepdim=True)], dim=1)
    return tokens


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_full_passes_with_any_cache(native_family, kind):
    model, tokens = depth_model(native_family, kind), prompt(WINDOW + 3)
    expected = by_full_passes(model, tokens)
    assert not torch.allclose(
        logits(model, tokens), logits(tiny_model(native_family, torch.float64), tokens), atol=1e-2
    )
    for given in ({}, {"cache_implementation": "static"}, {"use_cache": False}):
        assert torch.equal(model.generate(tokens, **GREEDY, **given), expected), given


@pytest.mark.parametrize("steps", [[10, 5] + [1] * 5, [3, 1, 12, 1, 1, 2], [1] * 10], ids=str)
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("kind", ["default", "reused", "released"])
def test_a_prompt_in_chunks_has_the_logits_of_one_pass(native_family, kind, static, steps):
    model, tokens, found = depth_model(native_family, kind), prompt(sum(steps)), []
    cache = StaticCache(model.config, max_cache_len=32) if static else DynamicCache(config=model.config)
    with torch.no_grad():
        for part in tokens.split(steps, dim=1):
            found.append(model(part, past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(found, dim=1), logits(model, tokens), **CLOSE)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_left_padded_batch_gives_the_tokens_of_its_rows_alone(native_family, kind, cache):
    # In float64 the eager attention of Gemma-2 itself gives NaN for rows that are padding alone.
    model = depth_model(native_family, kind, torch.float32)
    rows, longest = [prompt(length, batch=1, seed=length) for length in (WINDOW + 4, 3)], WINDOW + 4
    padded = torch.cat([torch.nn.functional.pad(row, (longest - row.shape[1], 0)) for row in rows])
    together = model.generate(padded, attention_mask=(padded != 0).long(), cache_implementation=cache, **GREEDY)
    for row, tokens in zip(rows, together, strict=True):
        assert torch.equal(tokens[longest:], model.generate(row, **GREEDY)[0, row.shape[1] :])


@pytest.mark.parametrize("kind", ["default", "released", "last"])
def test_beams_do_not_depend_on_the_cache(native_family, kind):
    model, tokens = depth_model(native_family, kind), prompt(6)
    beams = {"num_beams": 3, "num_return_sequences": 2, **GREEDY}
    expected = model.generate(tokens, use_cache=False, **beams)
    assert torch.equal(model.generate(tokens, **beams), expected)
    for row in range(2):
        assert torch.equal(model.generate(tokens[row : row + 1], **beams), expected[2 * row : 2 * row + 2])


@pytest.mark.parametrize("help_", ["assistant", "lookup"])
@pytest.mark.parametrize("kind", ["default", "last"])
def test_assisted_decoding_gives_the_same_tokens(kind, help_):
    model, row = depth_model("llama", kind), prompt(4, batch=1).repeat(1, 2)
    given = {"prompt_lookup_num_tokens": 3} if help_ == "lookup" else {}
    if help_ == "assistant":
        given["assistant_model"] = tiny_model("llama", torch.float64)
    assert torch.equal(model.generate(row, **GREEDY, **given), by_full_passes(model, row))


@pytest.mark.parametrize("kind", ["default", "reused", "released"])
def test_documents_in_one_row_do_not_see_each_other(native_family, kind):
    model, documents = depth_model(native_family, kind), [prompt(length, 1, length) for length in (WINDOW + 2, 5)]
    positions = torch.cat([torch.arange(document.shape[1]) for document in documents])[None]
    packed = logits(model, torch.cat(documents, dim=1), position_ids=positions)
    apart = torch.cat([logits(model, document) for document in documents], dim=1)
    torch.testing.assert_close(packed, apart, **CLOSE)


def test_attention_to_the_depth_is_to_the_own_position_alone(native_family):
    model, tokens = depth_model(native_family, "projected"), prompt(WINDOW)
    changed = torch.cat([tokens[:, :5], prompt(WINDOW - 5, seed=9)], dim=1)
    before, after = logits(model, tokens), logits(model, changed)
    torch.testing.assert_close(before[:, :5], after[:, :5], **CLOSE)
    assert not torch.allclose(before[:, 5:], after[:, 5:], atol=1e-3)


@pytest.mark.parametrize("kind", ["default", "projected", "reused"])
def test_before_training_it_generates_as_the_base_does_bit_for_bit(native_family, kind):
    model, base = depth_model(native_family, kind, torch.float32, acting=False), tiny_model(native_family)
    row, longest = prompt(3, batch=1), WINDOW + 4
    padded = torch.cat([prompt(longest, batch=1, seed=1), torch.nn.functional.pad(row, (longest - 3, 0))])
    given = {"attention_mask": (padded != 0).long(), "return_dict_in_generate": True, "output_logits": True, **GREEDY}
    found, expected = model.generate(padded, **given), base.generate(padded, **given)
    for step, of_base in zip(found.logits, expected.logits, strict=True):
        assert torch.equal(step, of_base)

"""Models whose memories are called directly: the same bits as through the registered op, and as the base's where values are zero."""

import contextlib

import pytest
import torch
from models.upscaled import upscaled_model, upscaled_pair
from pairs import by_default
from tiny import FAMILIES, prompt
from transformers import DynamicCache, StaticCache

from midus_hf.memory.kept_values import kept_values
from midus_hf.ops import headwise_memory

MODES = {"no-grad": torch.no_grad, "inference": torch.inference_mode}
LENGTHS = (6, 1, 1)
"""Tokens of a prompt, and of two steps behind it."""


def logits_of_steps(model, cache, forward=None) -> list[torch.Tensor]:
    tokens = prompt(sum(LENGTHS)).split(LENGTHS, dim=1)
    forwards = (model, *[model if forward is None else forward] * (len(LENGTHS) - 1))
    return [step(input_ids=part, past_key_values=cache).logits for step, part in zip(forwards, tokens, strict=True)]


def cache_of(model, kind: str):
    return (
        StaticCache(model.config, max_cache_len=sum(LENGTHS))
        if kind == "static"
        else DynamicCache(config=model.config)
    )


@pytest.fixture(params=sorted(MODES))
def mode(request):
    """A context without gradients."""
    return MODES[request.param]


@pytest.mark.parametrize("values", ["plain", "kept"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_logits_are_those_of_the_registered_op(family, mode, cache, values, monkeypatch):
    model = upscaled_model(family)
    asked = []
    for name in ("headwise_lookup_op", "transformed_lookup_op"):
        registered = headwise_memory.__globals__[name]
        told = lambda *given, registered=registered: (asked.append(1), registered(*given))[1]  # noqa: E731
        monkeypatch.setitem(headwise_memory.__globals__, name, told)
    logits = []
    for watched in (False, True):
        if watched:
            monkeypatch.setitem(headwise_memory.__globals__, "nobody_watches", lambda: False)
        with mode(), kept_values(model) if values == "kept" else contextlib.nullcontext():
            logits.append(logits_of_steps(model, cache_of(model, cache)))
        assert len(asked) == (2 * len(LENGTHS) if watched else 0)
    assert all(torch.equal(direct, through) for direct, through in zip(*logits, strict=True))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_blocks_without_values_change_no_bit(family, mode, cache):
    models = upscaled_pair(family, acting=False)
    with mode():
        for keeping in (contextlib.nullcontext, lambda: kept_values(models[1])):
            with keeping():
                base, model = (logits_of_steps(each, cache_of(each, cache)) for each in models)
            assert all(torch.equal(one, other) for one, other in zip(base, model, strict=True))


@pytest.mark.parametrize("family", by_default(["llama", "gemma2"], FAMILIES))
def test_a_compiled_step_of_blocks_without_values_changes_no_bit(family):
    sizes = {"attention": "eager", "num_hidden_layers": 2, "new_layers": (1,)}
    base, model = upscaled_pair(family, acting=False, **sizes)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad(), kept_values(model):
        expected = logits_of_steps(base, cache_of(base, "static"))
        found = logits_of_steps(model, cache_of(model, "static"), forward=compiled)
    torch._dynamo.reset()
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_a_pass_without_gradients_between_two_with_them_changes_neither():
    model = upscaled_model("llama", num_hidden_layers=1, new_layers=(0,))
    tables = list(model.model.layers[0].memory.parameters())
    first, second = prompt(3), prompt(3, seed=2)
    apart = [torch.autograd.grad(model(tokens).logits.sum(), tables) for tokens in (first, second)]
    together = model(first).logits.sum()
    with torch.no_grad(), kept_values(model):
        model(second)
    together = together + model(second).logits.sum()
    for found, *parts in zip(torch.autograd.grad(together, tables), *apart, strict=True):
        torch.testing.assert_close(found, sum(parts), rtol=1e-4, atol=1e-6)

"""Models whose memories fetch blocks compile around the fetching, and have the gradients of hooks on the base."""

import pytest
import torch
from models.gradients import gradients_of_blocks, loss_and_gradients
from models.hierarchical_models import IDS, KINDS, add_reference, hierarchical_model
from models.hosting import logits
from tiny import prompt, tiny_model

TWO_LAYERS = {"base": {"num_hidden_layers": 2}, "layers": [1]}


def test_with_ids_it_compiles_around_the_fetching(tmp_path):
    torch._dynamo.reset()
    model, tokens = hierarchical_model("llama", "hier-ffn", tmp_path, torch.float32, **TWO_LAYERS), prompt(6)
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(logits(compiled, tokens, memory_ids=IDS), logits(model, tokens, memory_ids=IDS))


@pytest.mark.parametrize("kind", [*KINDS, KINDS], ids=lambda kind: kind if isinstance(kind, str) else "all")
def test_gradients_of_blocks_are_those_of_hooks_on_the_base(native_family, kind, tmp_path):
    """Of each block that was fetched, and of no other."""
    model, native, tokens = (
        hierarchical_model(native_family, kind, tmp_path),
        tiny_model(native_family, torch.float64),
        prompt(7),
    )
    model.banks.train()
    _, found = loss_and_gradients(model, tokens, memory_ids=IDS)
    add_reference(native, model, IDS)
    native(tokens, labels=tokens, use_cache=False).loss.backward()
    expected = {name: value.grad for name, value in native.named_parameters()} | gradients_of_blocks(model)
    names = sorted(model.banks.layouts)
    fetched = [(name, *key) for name in names for key in ((1, 1), (1, 3), (3, 13), (3, 27))]
    assert sorted(key for key in found if isinstance(key, tuple)) == fetched and found.keys() == expected.keys()
    for key, gradient in expected.items():
        assert gradient.any()
        torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-7)


def test_what_inference_mode_fetched_serves_a_pass_with_gradients(tmp_path):
    model, tokens = hierarchical_model("llama", KINDS, tmp_path), prompt(6)
    with torch.inference_mode():
        expected = model(tokens, memory_ids=IDS).logits
    output = model(tokens, memory_ids=IDS, labels=tokens)
    torch.testing.assert_close(output.logits.detach(), expected.clone())
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())

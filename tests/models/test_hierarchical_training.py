"""Models whose memories fetch blocks compile, and have the gradients of hooks on the base."""

import pytest
import torch
from models.hierarchical_models import (
    IDS,
    KINDS,
    OTHER_IDS,
    add_reference,
    hierarchical_model,
    logits,
)
from tiny import prompt, tiny_model

TWO_LAYERS = {"base": {"num_hidden_layers": 2}, "layers": [1]}


def test_it_compiles_as_one_graph_with_blocks_fetched_ahead(tmp_path):
    torch._dynamo.reset()
    model, tokens = hierarchical_model("llama", KINDS, tmp_path, torch.float32, **TWO_LAYERS), prompt(6)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for ids in (IDS, IDS.flip(0)):
        blocks = model.fetch_memory(ids)
        expected = logits(model, tokens, memory_blocks=blocks)
        assert not torch.allclose(expected, logits(model, tokens), atol=1e-3)
        torch.testing.assert_close(logits(compiled, tokens, memory_blocks=blocks), expected)


def test_it_trains_compiled(tmp_path):
    torch._dynamo.reset()
    model, tokens = hierarchical_model("llama", "hier-ffn", tmp_path, torch.float32, **TWO_LAYERS).train(), prompt(6)
    bank = model.banks.train()["hier-ffn"]
    _, expected = gradients(model, tokens, memory_ids=IDS)
    blocks = model.fetch_memory(IDS)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    model.zero_grad()
    compiled(tokens, labels=tokens, memory_blocks=blocks).loss.backward()
    assert len(bank.leaves()) == 4
    found = {name: value.grad for name, value in model.named_parameters()} | taken_gradients(model)
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-7)


def test_with_ids_it_compiles_around_the_fetching(tmp_path):
    torch._dynamo.reset()
    model, tokens = hierarchical_model("llama", "hier-ffn", tmp_path, torch.float32, **TWO_LAYERS), prompt(6)
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(logits(compiled, tokens, memory_ids=IDS), logits(model, tokens, memory_ids=IDS))


def gradients(model, tokens, **given):
    """Loss, and the gradients of parameters and of blocks by level and index."""
    model.zero_grad()
    loss = model(tokens, labels=tokens, use_cache=False, **given).loss
    loss.backward()
    found = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    return loss.detach(), found | taken_gradients(model)


def taken_gradients(model):
    found = {}
    for name in model.banks.layouts:
        bank = model.banks.of(name)
        for key, state in sorted(bank._states.items()):
            if state.master.grad is not None:
                found[name, *key] = state.master.grad.clone()
        bank.forget_gradients()
    return found


@pytest.mark.parametrize("kind", [*KINDS, KINDS], ids=lambda kind: kind if isinstance(kind, str) else "all")
def test_gradients_of_blocks_are_those_of_hooks_on_the_base(native_family, kind, tmp_path):
    """Of each block that was fetched, and of no other."""
    model, native, tokens = (
        hierarchical_model(native_family, kind, tmp_path),
        tiny_model(native_family, torch.float64),
        prompt(7),
    )
    model.banks.train()
    _, found = gradients(model, tokens, memory_ids=IDS)
    add_reference(native, model, IDS)
    native(tokens, labels=tokens, use_cache=False).loss.backward()
    expected = {name: value.grad for name, value in native.named_parameters()} | taken_gradients(model)
    names = sorted(model.banks.layouts)
    fetched = [(name, *key) for name in names for key in ((1, 1), (1, 3), (3, 13), (3, 27))]
    assert sorted(key for key in found if isinstance(key, tuple)) == fetched and found.keys() == expected.keys()
    for key, gradient in expected.items():
        assert gradient.any()
        torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_activation_checkpointing_changes_no_gradient(native_family, kind, use_reentrant, tmp_path):
    model = hierarchical_model(native_family, kind, tmp_path, torch.float32).train()
    model.banks.train()
    tokens = prompt(7)
    loss, expected = gradients(model, tokens, memory_ids=IDS)
    assert sum(isinstance(key, tuple) for key in expected) == 4
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    again, found = gradients(model, tokens, memory_ids=IDS)
    assert torch.equal(loss, again) and found.keys() == expected.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-5, atol=1e-7)


def test_with_a_frozen_base_blocks_alone_have_gradients_also_under_checkpointing(native_family, tmp_path):
    model = hierarchical_model(native_family, KINDS, tmp_path, torch.float32).train()
    model.requires_grad_(False)
    model.banks.train()
    tokens = prompt(7)
    _, expected = gradients(model, tokens, memory_ids=IDS)
    assert len(expected) == 4 * len(KINDS) and all(gradient.any() for gradient in expected.values())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    _, found = gradients(model, tokens, memory_ids=IDS)
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_two_passes_before_one_backward_have_the_gradients_of_both(native_family, kind, tmp_path):
    model, batches = hierarchical_model(native_family, kind, tmp_path).train(), (prompt(6), prompt(6, seed=2))
    model.banks.train()
    apart = []
    for tokens, ids in zip(batches, (IDS, OTHER_IDS), strict=True):
        apart.append(gradients(model, tokens, memory_ids=ids)[1])
    model.zero_grad()
    losses = [
        model(tokens, labels=tokens, memory_ids=ids).loss
        for tokens, ids in zip(batches, (IDS, OTHER_IDS), strict=True)
    ]
    sum(losses).backward()
    together = {name: value.grad for name, value in model.named_parameters()} | taken_gradients(model)
    assert together.keys() == apart[0].keys() | apart[1].keys()
    for key, gradient in together.items():
        expected = sum(found[key] for found in apart if key in found)
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-8)


def test_what_inference_mode_fetched_serves_a_pass_with_gradients(tmp_path):
    model, tokens = hierarchical_model("llama", KINDS, tmp_path), prompt(6)
    with torch.inference_mode():
        expected = model(tokens, memory_ids=IDS).logits
    output = model(tokens, memory_ids=IDS, labels=tokens)
    torch.testing.assert_close(output.logits.detach(), expected.clone())
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())

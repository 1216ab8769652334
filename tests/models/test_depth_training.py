"""Heads that read the depth, in training: what learns when, checkpointing, several passes, compilation, autocast, bounds of gates."""

import pytest
import torch
from models.depth_models import KINDS, depth_model, logits
from models.test_activation_checkpointing import enable_checkpointing
from pairs import by_default
from tiny import prompt, tiny_model


def gradients(model, tokens, **given):
    model.zero_grad()
    loss = model(tokens, labels=tokens, use_cache=False, **given).loss
    loss.backward()
    return loss.detach(), {
        name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None
    }


def check_close(found, expected, relative=1e-9):
    """Sums may be in another order; weights of norms have theirs in float32, whatever the model is in."""
    assert found.keys() == expected.keys()
    far = {name: ((found[name] - value).norm() / value.norm()).item() for name, value in expected.items()}
    allowed = {name: max(relative, 1e-6) if "norm" in name else relative for name in far}
    assert not [(name, distance) for name, distance in far.items() if not distance <= allowed[name]]


def new_parameters(model):
    return {name: value for name, value in model.named_parameters() if ".memories." in name}


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_activation_checkpointing_changes_no_gradient(native_family, kind, use_reentrant):
    model, tokens = depth_model(native_family, kind).train(), prompt()
    loss, expected = gradients(model, tokens)
    assert len(expected) == len(list(model.parameters())) and all(value.any() for value in expected.values())
    passes = []
    model.model.layers[2].mlp.register_forward_pre_hook(lambda *_: passes.append(1))
    enable_checkpointing(model, use_reentrant)
    again, found = gradients(model, tokens)
    assert torch.equal(again, loss) and len(passes) == 2
    check_close(found, expected)


@pytest.mark.parametrize("kind", ["default", "reused", "released"])
def test_with_a_frozen_base_what_is_new_learns_alike_under_checkpointing(native_family, kind):
    model, tokens = depth_model(native_family, kind).train(), prompt()
    model.requires_grad_(False)
    for value in new_parameters(model).values():
        value.requires_grad_(True)
    _, expected = gradients(model, tokens)
    assert expected.keys() == new_parameters(model).keys() and all(value.any() for value in expected.values())
    enable_checkpointing(model, False)
    check_close(gradients(model, tokens)[1], expected)


@pytest.mark.parametrize("kind", ["default", "bias", "projected", "reused", "released"])
def test_what_it_acts_through_learns_from_the_first_step_and_the_rest_from_the_next(native_family, kind):
    model, tokens = depth_model(native_family, kind, torch.float32, acting=False).train(), prompt()
    new = new_parameters(model)
    gates = {name for name in new if name.endswith("depth_gate")}
    values = {name for name in new if "_value" in name} if kind in ("default", "bias", "projected") else set()
    started = {name: value.detach().clone() for name, value in new.items()}
    optimizer = torch.optim.SGD(new.values(), lr=1.0)
    first = gradients(model, tokens)[1]
    learn = {name for name in new if first[name].any()}
    assert values <= learn <= values | gates and learn
    optimizer.step()
    with torch.no_grad():
        for name in gates:  # as optimisers do that step by the sign: every head begins somewhere
            new[name].copy_((new[name] + 0.1 * (new[name] == 0)).abs())
    second = gradients(model, tokens)[1]
    assert all(second[name].any() for name in new)
    optimizer.step()
    assert not [name for name, value in new.items() if torch.equal(value, started[name])]


def gate_of(model, layer=2):
    return model.model.layers[layer].memories["depth-attention"].depth_gate


@pytest.mark.parametrize(("bound", "beyond", "inside"), [(0.0, -0.3, 1e-6), (1.0, 1.3, 1 - 1e-6)], ids=["0", "1"])
@pytest.mark.parametrize("kind", ["default", "reused"])
def test_a_gate_beyond_a_bound_is_the_bound_with_the_gradient_that_leads_back(
    native_family, kind, bound, beyond, inside
):
    model, tokens = depth_model(native_family, kind), prompt()
    with torch.no_grad():
        gate_of(model).fill_(bound)
    at_bound, of_bound = logits(model, tokens), gradients(model, tokens)[1]
    name = "model.layers.2.memories.depth-attention.depth_gate"
    with torch.no_grad():
        gate_of(model).fill_(beyond)
    assert torch.equal(logits(model, tokens), at_bound)
    outside = gradients(model, tokens)[1][name]
    # At the bound as beyond it: what would lead inside is kept, what would lead further out is left out.
    assert torch.equal(outside, of_bound[name])
    with torch.no_grad():
        gate_of(model).fill_(inside)
    free = gradients(model, tokens)[1][name]
    back = free.clamp(max=0) if bound == 0 else free.clamp(min=0)
    torch.testing.assert_close(outside, back, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("kind", ["default", "reused"])
def test_gates_that_the_loss_asks_for_come_back_from_below_zero_and_others_do_not(kind):
    """Of all heads once, for the loss and its opposite ask for opposite ones."""
    asked = []
    for sign in (1, -1):
        model, tokens = depth_model("llama", kind), prompt()
        with torch.no_grad():
            gate_of(model).fill_(-0.1)
        (sign * model(tokens, labels=tokens, use_cache=False).loss).backward()
        gradient = gate_of(model).grad
        asked.append(gradient < 0)
        assert (gradient <= 0).all()
        torch.optim.SGD([gate_of(model)], lr=1000.0).step()
        assert torch.equal(gate_of(model) > -0.1, asked[-1])
    assert torch.equal(asked[0], ~asked[1])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["default", "reused", "released"])
def test_two_passes_before_one_backward_have_the_gradients_of_both(native_family, kind, checkpointing):
    model, batches = depth_model(native_family, kind).train(), (prompt(7), prompt(9, batch=1, seed=2))
    apart = [gradients(model, tokens)[1] for tokens in batches]
    if checkpointing:
        enable_checkpointing(model, False)
    model.zero_grad()
    sum(model(tokens, labels=tokens, use_cache=False).loss for tokens in batches).backward()
    together = {name: value.grad for name, value in model.named_parameters()}
    check_close(together, {name: value + apart[1][name] for name, value in apart[0].items()})


# Few layers, to be compiled soon.
DEEP = by_default([("gemma3", "default", 2)], [("llama", "reused", 3), ("gemma3", "default", 2)])


@pytest.mark.parametrize(("family", "kind", "layers"), DEEP)
def test_training_compiles_as_one_graph(family, kind, layers):
    torch._dynamo.reset()
    model, tokens = depth_model(family, kind, torch.float32, num_hidden_layers=layers).train(), prompt(6)
    _, expected = gradients(model, tokens)
    _, found = gradients(torch.compile(model, fullgraph=True, backend="aot_eager"), tokens)
    check_close({name.removeprefix("_orig_mod."): value for name, value in found.items()}, expected, 1e-4)


def test_inference_compiles_as_one_graph():
    torch._dynamo.reset()
    model, tokens = depth_model("qwen3", "released", torch.float32, num_hidden_layers=2), prompt(6)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(logits(compiled, tokens), logits(model, tokens))


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_changes_a_little_and_nothing_where_it_does_not_act(native_family, kind):
    tokens = prompt()
    model = depth_model(native_family, kind, torch.float32).train()
    _, expected = gradients(model, tokens)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, labels=tokens, use_cache=False).loss
    model.zero_grad()
    loss.backward()
    for name, value in model.named_parameters():
        assert value.grad.dtype == torch.float32 and value.grad.isfinite().all()
        alike = torch.nn.functional.cosine_similarity(value.grad.flatten(), expected[name].flatten(), dim=0)
        assert alike > 0.9, name
    if kind in ("joint", "added to reused"):  # which never are what the base is
        return
    still, base = depth_model(native_family, kind, torch.float32, acting=False), tiny_model(native_family)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(logits(still, tokens), logits(base, tokens))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["default", "reused", "released"])
def test_padding_of_texts_changes_no_gradient(native_family, kind, attention):
    """Also where rows that are padding alone read nothing of the sequence."""
    attention = "eager" if native_family == "gemma2" else attention  # whose scores are capped, which sdpa cannot
    model, texts = (
        depth_model(native_family, kind, torch.float32).train(),
        [prompt(length, 1, 1) for length in (11, 6)],
    )
    model.set_attn_implementation(attention)
    expected: dict[str, torch.Tensor] = {}
    for text in texts:
        model.zero_grad()
        model(text, labels=text, num_items_in_batch=15, use_cache=False).loss.backward()
        for name, value in model.named_parameters():
            expected[name] = expected.get(name, 0) + value.grad
    for before in (True, False):
        padded = [
            torch.nn.functional.pad(text, (11 - text.shape[1], 0) if before else (0, 11 - text.shape[1]))
            for text in texts
        ]
        tokens = torch.cat(padded)
        mask = (tokens != 0).long()
        labels = tokens.masked_fill(mask == 0, -100)
        labels[1, 11 - 6 if before else 0] = -100  # alone, the first token of a text is predicted from nothing
        given = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0), "num_items_in_batch": 15}
        model.zero_grad()
        model(tokens, labels=labels, use_cache=False, **given).loss.backward()
        check_close({name: value.grad for name, value in model.named_parameters()}, expected, 1e-4)

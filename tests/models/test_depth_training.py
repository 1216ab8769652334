"""Heads that read the depth, in training: bounds of gates, and padding of texts."""

import pytest
import torch
from models.depth_models import depth_model
from models.gradients import check_close, loss_and_gradients
from models.hosting import logits
from tiny import prompt


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
    at_bound, of_bound = logits(model, tokens), loss_and_gradients(model, tokens)[1]
    name = "model.layers.2.memories.depth-attention.depth_gate"
    with torch.no_grad():
        gate_of(model).fill_(beyond)
    assert torch.equal(logits(model, tokens), at_bound)
    outside = loss_and_gradients(model, tokens)[1][name]
    # At the bound as beyond it: what would lead inside is kept, what would lead further out is left out.
    assert torch.equal(outside, of_bound[name])
    with torch.no_grad():
        gate_of(model).fill_(inside)
    free = loss_and_gradients(model, tokens)[1][name]
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

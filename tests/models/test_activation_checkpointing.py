"""Activation checkpointing changes memory and time, not one bit of a gradient."""

import pytest
import torch
from models.upscaled import upscaled_model
from tiny import prompt
from transformers import PreTrainedModel


def loss_and_gradients(model: PreTrainedModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.train()
    model.zero_grad()
    loss = model(prompt(), labels=prompt(), use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def enable_checkpointing(model: PreTrainedModel, use_reentrant: bool) -> None:
    # transformers 5.23 renamed the method; 5.17 has the old name alone.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})


def count_calls(model: PreTrainedModel) -> list[int]:
    """Count the forwards of every memory from now on; a checkpointed layer runs twice a step."""
    calls = []
    for layer in model.model.layers:
        if hasattr(layer, "memory"):
            layer.memory.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_loss_and_gradients_are_bit_equal(family, use_reentrant):
    model = upscaled_model(family)
    loss, gradients = loss_and_gradients(model)
    assert set(gradients) == {name for name, _ in model.named_parameters()}
    assert all(gradient.any() for name, gradient in gradients.items() if ".memory." in name)

    enable_checkpointing(model, use_reentrant)
    calls = count_calls(model)
    checkpointed_loss, checkpointed = loss_and_gradients(model)
    assert len(calls) == 4
    assert torch.equal(checkpointed_loss, loss)
    assert checkpointed.keys() == gradients.keys()
    assert all(torch.equal(checkpointed[name], gradient) for name, gradient in gradients.items())


def test_with_a_frozen_base_the_blocks_alone_get_the_same_gradients(family):
    model = upscaled_model(family)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("model.layers.1.", "model.layers.4.")))
    loss, gradients = loss_and_gradients(model)
    enable_checkpointing(model, use_reentrant=False)
    checkpointed_loss, checkpointed = loss_and_gradients(model)
    assert torch.equal(checkpointed_loss, loss)
    assert checkpointed.keys() == gradients.keys() and len(gradients) > 0
    assert all(torch.equal(checkpointed[name], gradient) for name, gradient in gradients.items())


def test_two_forwards_before_two_backwards_keep_apart(family):
    model = upscaled_model(family).train()
    enable_checkpointing(model, use_reentrant=False)
    losses = [model(prompt(seed=seed), labels=prompt(seed=seed), use_cache=False).loss for seed in (1, 2)]
    sum(losses).backward()
    together = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    for seed in (2, 1):
        model(prompt(seed=seed), labels=prompt(seed=seed), use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(together[name], parameter.grad, msg=lambda text, name=name: f"{name}: {text}")

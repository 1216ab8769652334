"""Training a memory: what trains, gradients under activation checkpointing, and passes that leave nothing behind."""

import copy

import pytest
import torch
from sites.cases import CASES, MOST, SOME, each
from tiny import prompt

from midus_hf.training.optim.freezing import set_trainable
from midus_hf.training.optim.parameter_groups import parameter_groups
from midus_hf.training.optim.rates import Rates

SCALES = torch.tensor([0.5, -2.0])


def loss_of(model, seed: int = 1) -> torch.Tensor:
    tokens = prompt(seed=seed)
    return model(tokens, labels=tokens, use_cache=False, toy_scale=SCALES).loss


def gradients(model, *seeds: int) -> dict[str, torch.Tensor]:
    """Gradients of the summed losses of a prompt for each seed, all forward passes first."""
    model.train()
    model.zero_grad()
    sum([loss_of(model, seed) for seed in seeds or (1,)]).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def enable_checkpointing(model, use_reentrant: bool) -> None:
    # transformers 5.23 renamed the method; 5.17 has the old name alone.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})


@each(MOST)
def test_the_new_memory_alone_trains_and_its_values_move_at_once(case, family, toy_model):
    model = toy_model(case, family, acting=False)
    report = set_trainable(model, "auto")
    trains = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trains == {name for name, _ in model.named_parameters() if case.is_new(name)} != set()
    assert report.parameters == sum(model.get_parameter(name).numel() for name in trains)
    groups = parameter_groups(model, Rates(learning_rate=1e-2, weight_decay=0.1))
    memory = {name for name in trains if "memor" in name}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    keys_and_values = next(group for group in groups if group["name"] == "keys_and_values")
    assert {names[id(parameter)] for parameter in keys_and_values["params"]} == memory

    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(groups)
    for _ in range(2):  # values are zero at first, and hold back the gradient of keys for one step
        gradients(model)
        optimizer.step()
        assert all(
            not torch.equal(model.get_parameter(name), before[name])
            for name in memory
            if name.endswith(("up", "table"))
        )
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != (name in trains), name


@pytest.mark.parametrize("trainable", ["auto", "all"])
@each(MOST)
def test_activation_checkpointing_changes_no_bit_of_a_gradient(case, family, trainable, toy_model):
    model = toy_model(case, family)
    set_trainable(model, trainable)
    plain = gradients(model)
    assert plain.keys() == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(gradient.any() for name, gradient in plain.items() if case.is_new(name))
    enable_checkpointing(model, use_reentrant=False)
    checkpointed = gradients(model)
    assert checkpointed.keys() == plain.keys()
    assert all(torch.equal(checkpointed[name], gradient) for name, gradient in plain.items())


@each(SOME)
def test_reentrant_checkpointing_gives_the_same_gradients(case, family, toy_model):
    model = toy_model(case, family)
    plain = gradients(model)
    enable_checkpointing(model, use_reentrant=True)
    checkpointed = gradients(model)
    assert checkpointed.keys() == plain.keys()
    assert all(torch.equal(checkpointed[name], gradient) for name, gradient in plain.items())


@pytest.mark.parametrize("checkpointed", [False, True])
@each(SOME)
def test_two_forward_passes_before_a_backward_pass_give_the_sum_of_their_gradients(
    case, family, checkpointed, toy_model
):
    model = toy_model(case, family, torch.float64)
    if checkpointed:
        enable_checkpointing(model, use_reentrant=False)
    together = gradients(model, 1, 2)
    first, second = gradients(model, 1), gradients(model, 2)
    assert together.keys() == first.keys() == second.keys()
    for name, gradient in together.items():
        torch.testing.assert_close(gradient, first[name] + second[name], rtol=1e-9, atol=1e-12)


def attributes(model) -> dict[str, dict]:
    """Every attribute of every module; what is a container is copied, so that a change within it shows."""
    return {
        name: {
            key: copy.copy(value) if isinstance(value, dict | list | set) else value
            for key, value in vars(module).items()
        }
        for name, module in model.named_modules()
    }


def is_same(before, after) -> bool:
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(is_same(value, after[key]) for key, value in before.items())
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(is_same, before, after))
    return before is after or (not isinstance(before, torch.Tensor) and before == after)


@pytest.mark.parametrize("checkpointed", [False, True])
@each(SOME)
def test_a_pass_leaves_no_attribute_of_a_module_changed(case, family, checkpointed, toy_model):
    model = toy_model(case, family).train()
    if checkpointed:
        enable_checkpointing(model, use_reentrant=False)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = attributes(model)
    loss_of(model).backward()
    after = attributes(model)
    assert before.keys() == after.keys()
    assert [name for name in before if not is_same(before[name], after[name])] == []
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_another_pass_between_forward_and_backward_changes_no_gradient(toy_model):
    model = toy_model(CASES["skip"], "llama").train()
    enable_checkpointing(model, use_reentrant=False)
    expected = gradients(model)
    model.zero_grad()
    loss = loss_of(model)
    with torch.no_grad():
        model(prompt(seed=5, batch=3), toy_scale=torch.tensor([9.0, 8.0, 7.0]))
    loss.backward()
    for name, gradient in expected.items():
        assert torch.equal(model.get_parameter(name).grad, gradient), name

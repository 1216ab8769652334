"""Training a memory: what trains, and passes that leave nothing behind."""

import copy

import pytest
import torch
from models.gradients import enable_checkpointing
from sites.cases import CASES, MOST, SOME, each
from tiny import prompt

from midus_hf.training.optim.freezing import set_trainable
from midus_hf.training.optim.parameter_groups import parameter_groups
from midus_hf.training.optim.rates import Rates

SCALES = torch.tensor([0.5, -2.0])


def loss_of(model) -> torch.Tensor:
    return model(prompt(), labels=prompt(), use_cache=False, toy_scale=SCALES).loss


def gradients(model) -> dict[str, torch.Tensor]:
    model.train()
    model.zero_grad()
    loss_of(model).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


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
    of_memory = [parameter for group in groups if group["name"] in ("keys", "values") for parameter in group["params"]]
    assert {names[id(parameter)] for parameter in of_memory} == memory

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

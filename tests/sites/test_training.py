"""Training a memory: what trains, also beside adapters, and passes that leave nothing behind."""

import pytest
import torch
from models.gradients import enable_checkpointing
from models.optimizer_steps import train_steps
from peft import PeftModel, get_peft_model
from sites.cases import each
from tiny import prompt

from midus_hf.training.adapters import lora_config
from midus_hf.training.optim.freezing import set_trainable
from midus_hf.training.optim.parameter_groups import parameter_groups
from midus_hf.training.optim.rates import Rates


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=prompt(), use_cache=False).logits


def names_that_train(model) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@each()
def test_the_new_memory_alone_trains_and_its_values_move_at_once(case, family, toy_model):
    model = toy_model(case, family, acting=False)
    report = set_trainable(model, "auto")
    trains = names_that_train(model)
    assert trains == {name for name, _ in model.named_parameters() if case.is_new(name)} != set()
    assert report.parameters == sum(model.get_parameter(name).numel() for name in trains)
    groups = parameter_groups(model, Rates(learning_rate=1e-2, weight_decay=0.1))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    of_memory = [parameter for group in groups if group["name"] in ("keys", "values") for parameter in group["params"]]
    assert {names[id(parameter)] for parameter in of_memory} == {name for name in trains if "memor" in name}

    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    train_steps(model, 1, groups)
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert {name for name in trains if name.endswith(("up", "table"))} <= moved <= trains
    train_steps(model, 1, groups)  # values are zero at first, and hold back the gradient of keys for one step
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == trains


@each()
def test_beside_adapters_the_memory_trains_whole_is_saved_with_them_and_merged(case, family, toy_model, tmp_path):
    start = toy_model(case, family, acting=False)
    new, untrained = {name for name in start.state_dict() if case.is_new(name)}, logits(start)
    model = get_peft_model(start, lora_config(start, r=2))
    assert torch.equal(logits(model), untrained)
    trains = names_that_train(model)
    whole = {name for name in trains if "lora_" not in name}
    assert {name.removeprefix("base_model.model.").replace(".modules_to_save.default", "") for name in whole} == new
    assert all(".modules_to_save.default." in name for name in whole)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    train_steps(model, 3, parameter_groups(model, Rates(learning_rate=1e-2)))
    assert {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])} == trains
    trained = logits(model)
    assert not torch.allclose(trained, untrained, atol=1e-3)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(toy_model(case, family, acting=False), tmp_path)
    assert torch.equal(logits(again), trained)
    torch.testing.assert_close(logits(model.merge_and_unload()), trained, rtol=1e-4, atol=1e-5)  # rounds once more


def attributes(model) -> dict[tuple[str, str], list]:
    """Every attribute of every module, and what containers among them hold."""
    held = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            inner = [*value, *value.values()] if isinstance(value, dict) else value
            held[name, key] = [value, *inner] if isinstance(value, dict | list | set) else [value]
    return held


def is_same(before, after) -> bool:
    return before is after or (not isinstance(before, torch.Tensor) and before == after)


@pytest.mark.parametrize("checkpointed", [False, True])
@each()
def test_a_pass_leaves_no_attribute_of_a_module_changed(case, family, checkpointed, toy_model):
    model = toy_model(case, family).train()
    if checkpointed:
        enable_checkpointing(model, use_reentrant=False)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before, scales = attributes(model), torch.tensor([0.5, -2.0])
    model(prompt(), labels=prompt(), use_cache=False, toy_scale=scales).loss.backward()
    after = attributes(model)
    assert {key: len(held) for key, held in before.items()} == {key: len(held) for key, held in after.items()}
    assert [key for key, held in before.items() if not all(map(is_same, held, after[key]))] == []
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())

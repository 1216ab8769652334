"""The balance loss is computed once a pass from what the memories read, and added in training alone."""

import pytest
import torch
from look.memory_models import ENTRIES, enable_checkpointing, has_hooks, memories, memory_model
from tiny import prompt
from training.outcomes import events
from training.tiny_run import refused
from transformers import Trainer

from midus_hf.memory.balance import balance_loss
from midus_hf.training.balance import mean_balance, record_readings
from midus_hf.training.run import prepare, train

COEFFICIENT = 0.5


@pytest.mark.parametrize("entry", ENTRIES)
def test_it_is_the_mean_over_what_every_memory_read_in_every_pass(family, entry):
    model, batches = memory_model(family, entry), [prompt(seed=seed) for seed in (1, 2)]
    inputs: list = []
    with record_readings(model) as readings:
        for memory in memories(model).values():
            memory.register_forward_pre_hook(lambda memory, given: inputs.append((memory, given[0].detach())))
        for tokens in batches:
            model(tokens, use_cache=False)
    expected = torch.stack([balance_loss(memory, given) for memory, given in inputs]).mean()
    assert len(inputs) == 4
    assert torch.equal(mean_balance(readings), expected) and expected > 1


@pytest.mark.parametrize("entry", ENTRIES)
def test_checkpointing_changes_neither_the_loss_nor_a_gradient(family, entry):
    results = []
    for checkpointing in (False, True):
        model = memory_model(family, entry).train()
        if checkpointing:
            enable_checkpointing(model)
        with record_readings(model) as readings:
            loss = model(prompt(), labels=prompt(), use_cache=False).loss
        total = loss + COEFFICIENT * mean_balance(readings)
        total.backward()
        results.append((total, {name: parameter.grad for name, parameter in model.named_parameters()}))
    (total, gradients), (checkpointed_total, checkpointed) = results
    assert torch.equal(total, checkpointed_total)
    assert all(torch.equal(gradient, checkpointed[name]) for name, gradient in gradients.items())
    for memory in memories(model).values():
        keys = memory.names_of("key")
        assert all(getattr(memory, name).grad.any() for name in keys)


def test_what_is_computed_again_inside_the_context_is_not_read_again():
    model = memory_model("llama").train()
    enable_checkpointing(model)
    with record_readings(model) as readings:
        loss = model(prompt(), labels=prompt(), use_cache=False).loss
        before = mean_balance(readings).detach()
        loss.backward()
        assert torch.equal(mean_balance(readings), before)
        assert len(readings) == 2
    assert not has_hooks(model)


def test_without_a_forward_pass_there_is_no_loss():
    with refused(r"no memory that selects sub-keys has read anything; expected a forward pass of a model with head"):
        mean_balance([])


@pytest.mark.parametrize(("accumulation", "document_mask"), [(1, True), (2, False)])
def test_a_run_adds_it_to_the_loss_and_logs_it_without_its_coefficient(
    config_for, tmp_path, accumulation, document_mask
):
    options = {"gradient_accumulation_steps": accumulation, "max_steps": 3, "document_mask": document_mask}
    train(config_for("plain", **options))
    train(config_for("with", balance_loss=COEFFICIENT, **options))
    plain, balanced = events(tmp_path / "plain"), events(tmp_path / "with")
    assert all("balance_loss" not in event for event in plain)
    assert all(event["balance_loss"] > 1 for event in balanced)
    added = balanced[0]["loss"] - plain[0]["loss"]
    assert added == pytest.approx(COEFFICIENT * balanced[0]["balance_loss"], rel=1e-4)


def test_accumulated_gradients_are_those_of_the_mean_over_passes(config_for):
    gradients = []
    for coefficient in (0.0, COEFFICIENT):
        config = config_for(str(coefficient), gradient_accumulation_steps=2, balance_loss=coefficient)
        trainer = prepare(config).trainer
        batches = list(trainer.get_train_dataloader())[:2]
        trainer.current_gradient_accumulation_steps = 2
        trainer.accelerator.gradient_accumulation_steps = 1
        for batch in batches:
            trainer.training_step(trainer.model, batch, num_items_in_batch=torch.tensor(2 * 2 * 15))
        gradients.append(
            {
                name: parameter.grad
                for name, parameter in trainer.model.named_parameters()
                if parameter.grad is not None
            }
        )
    model = prepare(config_for("alone")).model.train()
    for batch in batches:
        with record_readings(model) as readings:
            model(input_ids=batch["input_ids"], use_cache=False)
        (COEFFICIENT / 2 * mean_balance(readings)).backward()
    alone = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert any("row_keys" in name for name in alone)
    for name, gradient in alone.items():
        torch.testing.assert_close(gradients[1][name] - gradients[0][name], gradient, rtol=1e-3, atol=1e-5)


def test_the_loss_of_an_evaluation_is_without_it(config_for):
    losses = []
    for coefficient in (0.0, COEFFICIENT):
        trainer = prepare(config_for(str(coefficient), balance_loss=coefficient)).trainer
        losses.append(trainer.evaluate(trainer.train_dataset)["eval_loss"])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("entry", ["product-key", "linear"])
def test_it_is_computed_under_the_autocast_of_the_pass(entry):
    """Outside it the query projection would be in float32, and other sub-keys the best."""
    model = memory_model("llama", entry)
    with record_readings(model) as readings, torch.autocast("cpu", dtype=torch.bfloat16):
        model(prompt(), use_cache=False)
    found = mean_balance(readings)
    read = [reading[:2] for reading in readings]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = torch.stack([balance_loss(*one) for one in read]).mean()
    outside = torch.stack([balance_loss(memory, given.float()) for memory, given in read]).mean()
    assert torch.equal(found, expected) and not torch.equal(found, outside)


def test_sharded_parameters_are_refused(config_for, monkeypatch):
    create = Trainer.create_accelerator_and_postprocess

    def create_sharded(self):
        create(self)
        self.is_fsdp_enabled = True

    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", create_sharded)
    with refused(r"balance_loss is 0.1, which needs whole parameters; set it to 0, or train "):
        prepare(config_for(balance_loss=0.1))


def test_a_pass_that_trains_without_gradients_is_refused(family):
    model = memory_model(family, "headwise").train()
    with record_readings(model), torch.no_grad():
        with refused(r"as reentrant activation checkpointing runs; expected .*'use_reentrant': False"):
            model(prompt())
    with record_readings(model.eval()) as readings, torch.no_grad():
        model(prompt())
    assert mean_balance(readings) > 0

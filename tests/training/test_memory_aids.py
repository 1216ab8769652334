"""Runs with value schedules and usage in the log: what they log, and that they resume exactly."""

import math

import pytest
import torch
from look.memory_models import memory_model
from training.outcomes import exact_log, moved
from training.steered_runs import cut_off, executed_with_rates
from training.tiny_run import tiny_tokenizer
from transformers import AutoModelForCausalLM, TrainerCallback

from midus_hf.look.usage import record_usage
from midus_hf.training.run import prepare, train

USAGE = ("memory_used_share", "memory_perplexity")


@pytest.mark.parametrize(
    ("value_schedule", "factor"),
    [("fixed", lambda step: 1), ("4x-to-1x", lambda step: max(1, 4 - 3 * step / 5))],
    ids=["fixed", "4x-to-1x"],
)
def test_values_follow_their_schedule(config_for, value_schedule, factor):
    options = {"value_schedule": value_schedule, "value_learning_rate": 3e-2, "key_value_learning_rate": 3e-3}
    rates = executed_with_rates(prepare(config_for(**options)))
    main = [rate / 1e-2 for rate in rates["decay"]]
    assert main[:3] == [0, 0.5, 1] and main[11] == pytest.approx(0.5) and 0 < main[19] < 0.01
    assert main[2:] == pytest.approx([(1 + math.cos(math.pi * i / 18)) / 2 for i in range(18)])
    assert rates["values"] == pytest.approx([3e-2 * factor(step) * main[step] for step in range(20)])
    assert rates["keys"] == [3e-3] * 20


@pytest.mark.parametrize("value_transforms", ["weights", "values"])
def test_a_run_trains_the_transforms_as_it_is_told(config_for, value_transforms):
    run = prepare(config_for(value_transforms=value_transforms))
    transforms = {id(run.model.model.layers[layer].memory.value_transform) for layer in (1, 4)}
    optimizer = run.trainer.create_optimizer()
    (group,) = (g["name"] for g in optimizer.param_groups if transforms <= {id(p) for p in g["params"]})
    assert group == {"weights": "decay", "values": "keys_and_values"}[value_transforms]


def test_usage_is_told_of_the_tokens_since_the_last_time(config_for, upscaled, tmp_path):
    config = config_for(usage_steps=4, logging_steps=5, max_steps=10)
    run = prepare(config)
    batches = list(run.trainer.get_train_dataloader())
    given = []

    class Watch(TrainerCallback):
        def on_train_begin(self, args, state, control, model, **kwargs):
            model.register_forward_pre_hook(
                lambda _, args, kwargs: given.append((kwargs["input_ids"], copy_of(model))), with_kwargs=True
            )

    def copy_of(model):
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    run.trainer.add_callback(Watch())
    run.execute()
    assert len(given) == 10 and batches[0]["input_ids"].shape == given[0][0].shape
    events = {event["step"]: event for event in exact_log(tmp_path / "out")}
    assert sorted(events) == [4, 5, 8, 10]
    assert [step for step, event in events.items() if "memory_perplexity" in event] == [4, 8]

    model = AutoModelForCausalLM.from_pretrained(upscaled("llama")).train()
    for step, steps in ((4, given[:4]), (8, given[4:8])):
        with record_usage(model) as usage, torch.no_grad():
            for tokens, state in steps:
                model.load_state_dict(state)
                model(tokens, use_cache=False)
        layers = usage.summary().values()
        assert events[step]["memory_used_share"] == pytest.approx(sum(layer.used for layer in layers) / 2)
        assert events[step]["memory_perplexity"] == pytest.approx(sum(layer.perplexity for layer in layers) / 2)


@pytest.mark.parametrize(("entry", "bf16"), [("headwise", True), ("linear", False)])
def test_telling_of_usage_changes_nothing_that_is_computed(config_for, tmp_path, entry, bf16):
    memory_model("llama", entry).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    options = {"trainable": [1, 3], "bf16": bf16, "max_steps": 4}
    for name, every in (("plain", None), ("with", 2)):
        train(config_for(name, model=tmp_path / "model", usage_steps=every, **options))
    plain, told = exact_log(tmp_path / "plain"), exact_log(tmp_path / "with")
    assert [{name: value for name, value in event.items() if name not in USAGE} for event in told] == plain
    assert moved(tmp_path / "plain", tmp_path / "with") == set()


def test_no_hook_is_left_when_a_run_is_interrupted(config_for):
    run = prepare(config_for(usage_steps=1))
    cut_off(run, step=1)
    for layer in (1, 4):
        memory = run.model.model.layers[layer].memory
        assert not memory._forward_hooks and not memory._forward_pre_hooks

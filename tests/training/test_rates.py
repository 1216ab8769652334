"""What rates may be, and the course that they take over a run."""

import math
import re

import pytest
import torch
from training.tiny_run import refused
from transformers import AutoModelForCausalLM, TrainingArguments

from midus_hf.training.optim.parameter_groups import group_schedules
from midus_hf.training.optim.rates import Rates
from midus_hf.training.trainer.memory_trainer import MemoryTrainer


def course(rates: Rates, steps: int) -> list[float]:
    """What the maximum rate is multiplied by at each step, and after the last."""
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": 1.0, "course": "schedule"}])
    scheduler, factors = group_schedules(optimizer, rates, steps), []
    for _ in range(steps + 1):
        factors.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return factors


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learning_rate": 0}, "learning_rate is 0; expected a number above 0."),
        ({"memory_learning_rate": -1}, "memory_learning_rate is -1; expected a number above 0."),
        ({"gate_learning_rate": 0}, "gate_learning_rate is 0; expected a number above 0."),
        ({"value_weight_decay": -1}, "value_weight_decay is -1; expected 0 or more."),
        ({"value_schedule": "2x"}, "value_schedule is '2x'; expected one of 'constant', 'fixed', '4x-to-1x'."),
        (
            {"value_decay_ratio": 0.25, "value_schedule": "fixed"},
            "value_decay_ratio is 0.25, which value_schedule 'fixed' does not take; leave it out, or set value_schedule: 4x-to-1x.",
        ),
        (
            {"value_decay_ratio": 0, "value_schedule": "4x-to-1x"},
            "value_decay_ratio is 0; expected a share of the steps, 0 < ratio <= 1, such as 0.25.",
        ),
        ({"value_transforms": "keys"}, "value_transforms is 'keys'; expected one of 'weights', 'values'."),
        ({"memory_keys": "values"}, "memory_keys is 'values'; expected one of 'constant', 'weights'."),
        (
            {"lr_scheduler_type": "polynomial"},
            "lr_scheduler_type is 'polynomial'; expected one of 'cosine', 'linear', 'constant_with_warmup', 'warmup_stable_decay'.",
        ),
        (
            {"lr_scheduler_type": "warmup_stable_decay"},
            "lr_scheduler_type is 'warmup_stable_decay', which needs decay_ratio, the share of the steps in which the rate falls",
        ),
        (
            {"lr_scheduler_type": "warmup_stable_decay", "decay_ratio": 0.95},
            "decay_ratio is 0.95; expected a share of the steps, 0 < ratio <= 1 - warmup_ratio = 0.9.",
        ),
        (
            {"decay_ratio": 0.1},
            "decay_ratio is 0.1, which lr_scheduler_type 'cosine' does not take; leave it out, or set "
            "lr_scheduler_type: warmup_stable_decay.",
        ),
        (
            {"min_learning_rate_ratio": 1},
            "min_learning_rate_ratio is 1; expected a share of the maximum rate, 0 <= ratio < 1.",
        ),
        (
            {"min_learning_rate_ratio": 0.1, "lr_scheduler_type": "linear"},
            "min_learning_rate_ratio is 0.1, which lr_scheduler_type 'linear' does not take; leave it out, or set "
            "lr_scheduler_type: cosine or ",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_what_was_expected(values, message):
    with refused(re.escape(message)):
        Rates(**values)


def test_the_schedule_of_mixture_of_chapters_warms_up_stays_and_falls_where_the_paper_has_it():
    """Table 6: 9600 steps, warm-up over 250, decay from step 8160 on, to a tenth."""
    rates = Rates(
        lr_scheduler_type="warmup_stable_decay", warmup_ratio=0.02604, decay_ratio=0.15, min_learning_rate_ratio=0.1
    )
    factors = course(rates, 9600)
    assert factors[0] == pytest.approx(0.1) and factors[249] < 1
    assert factors[250] == factors[8159] == factors[8160] == 1 and factors[8161] < 1
    assert factors[8880] == pytest.approx(0.55) and factors[9600] == pytest.approx(0.1)


def test_a_cosine_can_end_above_zero():
    factors = course(Rates(warmup_ratio=0.1, min_learning_rate_ratio=0.1), 20)
    assert factors[:3] == [0, 0.5, 1] and factors[20] == pytest.approx(0.1)
    assert factors[2:] == pytest.approx([0.1 + 0.9 * (1 + math.cos(math.pi * i / 18)) / 2 for i in range(19)])


@pytest.mark.parametrize("steps", [3, 7, 10, 11])
def test_warm_up_and_decay_fill_no_more_than_the_run(steps):
    rates = Rates(lr_scheduler_type="warmup_stable_decay", warmup_ratio=0.5, decay_ratio=0.5)
    factors = course(rates, steps)
    assert factors[math.ceil(steps / 2)] == 1 and factors[steps] == 0


def test_a_trainer_takes_rates_and_its_arguments_say_the_same(upscaled, tmp_path):
    arguments = TrainingArguments(str(tmp_path), learning_rate=1.0, use_cpu=True, report_to="none")
    rates = Rates(
        learning_rate=1e-3,
        memory_learning_rate=2e-3,
        weight_decay=0.1,
        lr_scheduler_type="warmup_stable_decay",
        decay_ratio=0.5,
    )
    model = AutoModelForCausalLM.from_pretrained(upscaled("llama"))
    trainer = MemoryTrainer(model, arguments, rates=rates)
    trainer.create_optimizer_and_scheduler(num_training_steps=20)
    found = {group["name"]: group["initial_lr"] for group in trainer.optimizer.param_groups}
    assert found == {"decay": 1e-3, "no_decay": 1e-3, "memory": 2e-3, "keys_and_values": 1e-3}
    assert trainer.args.learning_rate == 1e-3 and trainer.args.weight_decay == 0.1
    assert trainer.args.lr_scheduler_type == "warmup_stable_decay" and trainer.args.get_warmup_steps(20) == 2
    assert [factor(12) for factor in trainer.lr_scheduler.lr_lambdas] == pytest.approx(
        [0.9045, 0.9045, 0.9045, 1], rel=1e-4
    )


def test_without_rates_a_trainer_takes_any_schedule_of_its_arguments(upscaled, tmp_path):
    options = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.5}}
    arguments = TrainingArguments(str(tmp_path), learning_rate=1e-2, use_cpu=True, report_to="none", **options)
    trainer = MemoryTrainer(AutoModelForCausalLM.from_pretrained(upscaled("llama")), arguments)
    trainer.create_optimizer_and_scheduler(num_training_steps=20)
    assert {group["initial_lr"] for group in trainer.optimizer.param_groups} == {1e-2}
    assert [factor(20) for factor in trainer.lr_scheduler.lr_lambdas] == [0.5, 0.5, 1]

"""Keys and values keep one rate, unless values have a schedule, and do not decay; all else follows the schedule."""

import pytest
import torch
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

from midus_hf.memory.registry import MemoryModule
from midus_hf.training.optim.freezing import set_trainable
from midus_hf.training.optim.parameter_groups import group_schedules, parameter_groups
from midus_hf.training.optim.rates import Rates
from tests.memory.building import build

KEYS = ("row_keys", "column_keys")


@pytest.fixture
def model(family, upscaled):
    model = AutoModelForCausalLM.from_pretrained(upscaled(family))
    set_trainable(model, "new")
    return model


def names_in(model, group) -> set[str]:
    inside = {id(parameter) for parameter in group["params"]}
    return {name for name, parameter in model.named_parameters() if id(parameter) in inside}


def memory_parameters(model, wanted) -> set[str]:
    memories = [name for name, module in model.named_modules() if isinstance(module, MemoryModule)]
    return {f"{memory}.{name}" for memory in memories for name in wanted}


def test_each_parameter_that_trains_is_in_the_group_it_belongs_to(model):
    groups = parameter_groups(model, Rates(learning_rate=1e-3, weight_decay=0.1))
    assert [group["name"] for group in groups] == ["decay", "no_decay", "keys_and_values"]
    decay, no_decay, keys_and_values = (names_in(model, group) for group in groups)
    assert keys_and_values == memory_parameters(model, (*KEYS, "value_bank"))
    trains = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    flat = {name for name in trains if "norm" in name or name.endswith("bias")}
    assert no_decay == flat and flat
    assert decay == trains - flat - keys_and_values
    assert memory_parameters(model, ["value_transform"]) <= decay


def test_the_groups_have_the_rates_and_the_decay_they_were_given(model):
    groups = parameter_groups(model, Rates(learning_rate=1e-3, weight_decay=0.1, key_value_learning_rate=2e-3))
    assert [(group["lr"], group["weight_decay"], group["course"]) for group in groups] == [
        (1e-3, 0.1, "schedule"),
        (1e-3, 0.0, "schedule"),
        (2e-3, 0.0, "constant"),
    ]


def test_keys_and_values_take_the_maximum_rate_unless_told_otherwise(model):
    assert parameter_groups(model, Rates(learning_rate=1e-3))[-1]["lr"] == 1e-3


def test_values_can_have_a_rate_of_their_own(model):
    groups = parameter_groups(model, Rates(learning_rate=1e-3, weight_decay=0.1, value_learning_rate=1e-2))
    assert [group["name"] for group in groups] == ["decay", "no_decay", "keys", "values"]
    assert names_in(model, groups[2]) == memory_parameters(model, KEYS)
    assert names_in(model, groups[3]) == memory_parameters(model, ["value_bank"])
    assert [(group["lr"], group["weight_decay"], group["course"]) for group in groups[2:]] == [
        (1e-3, 0.0, "constant"),
        (1e-2, 0.0, "constant"),
    ]


@pytest.mark.parametrize(
    ("value_schedule", "value_rate", "keys", "values"),
    [
        ("constant", 1e-2, (2e-3, "constant"), (1e-2, "constant")),
        ("fixed", 1e-2, (2e-3, "constant"), (1e-2, "schedule")),
        ("fixed", None, (2e-3, "constant"), (2e-3, "schedule")),
        ("4x-to-1x", None, (2e-3, "constant"), (2e-3, "4x-to-1x")),
    ],
)
def test_values_can_have_a_course_of_their_own(model, value_schedule, value_rate, keys, values):
    rates = Rates(
        learning_rate=1e-3,
        key_value_learning_rate=2e-3,
        value_learning_rate=value_rate,
        value_schedule=value_schedule,
    )
    groups = parameter_groups(model, rates)
    assert [group["name"] for group in groups] == ["decay", "no_decay", "keys", "values"]
    assert names_in(model, groups[2]) == memory_parameters(model, KEYS)
    assert names_in(model, groups[3]) == memory_parameters(model, ["value_bank"])
    assert [(group["lr"], group["course"]) for group in groups] == [
        (1e-3, "schedule"),
        (1e-3, "schedule"),
        keys,
        values,
    ]
    assert all(group["weight_decay"] == 0 for group in groups)


def test_transforms_of_values_count_as_weights_or_as_values(model):
    transforms = memory_parameters(model, ["value_transform"])
    as_weights = parameter_groups(model, Rates(learning_rate=1e-3, weight_decay=0.1, value_transforms="weights"))
    assert [names_in(model, group) for group in as_weights] == [
        names_in(model, group) for group in parameter_groups(model, Rates(learning_rate=1e-3, weight_decay=0.1))
    ]
    assert transforms <= names_in(model, as_weights[0])

    as_values = parameter_groups(model, Rates(learning_rate=1e-3, weight_decay=0.1, value_transforms="values"))
    assert [group["name"] for group in as_values] == ["decay", "no_decay", "keys_and_values"]
    assert names_in(model, as_values[0]) == names_in(model, as_weights[0]) - transforms
    assert names_in(model, as_values[2]) == memory_parameters(model, (*KEYS, "value_bank", "value_transform"))
    assert (as_values[2]["lr"], as_values[2]["weight_decay"], as_values[2]["course"]) == (1e-3, 0.0, "constant")


def test_transforms_that_count_as_values_take_their_rate_and_course(model):
    courses = {"value_schedule": "4x-to-1x", "value_transforms": "values"}
    groups = parameter_groups(model, Rates(learning_rate=1e-3, value_learning_rate=1e-2, **courses))
    assert groups[3]["name"] == "values"
    assert names_in(model, groups[3]) == memory_parameters(model, ["value_bank", "value_transform"])
    assert (groups[3]["lr"], groups[3]["course"]) == (1e-2, "4x-to-1x")


@pytest.mark.parametrize("values", ["shared", "own"])
def test_a_memory_without_transforms_has_the_same_groups_either_way(values):
    memory = build("headwise", hidden_size=8, num_heads=2, head_dim=4, n=4, k=2, values=values)
    groups = parameter_groups(memory, Rates(learning_rate=1e-3, value_transforms="values"))
    assert {group["name"]: names_in(memory, group) for group in groups} == {"keys_and_values": {*KEYS, "value_bank"}}


def test_what_memories_have_beside_keys_and_values_can_have_a_rate_of_its_own(model):
    rates = {"learning_rate": 1e-3, "memory_learning_rate": 2e-3, "weight_decay": 0.1}
    groups = parameter_groups(model, Rates(**rates))
    assert [group["name"] for group in groups] == ["decay", "no_decay", "memory", "keys_and_values"]
    assert names_in(model, groups[2]) == memory_parameters(model, ["value_transform"])
    assert (groups[2]["lr"], groups[2]["weight_decay"], groups[2]["course"]) == (2e-3, 0.1, "schedule")
    assert (groups[0]["lr"], groups[3]["lr"], groups[3]["course"]) == (1e-3, 1e-3, "constant")
    groups = parameter_groups(model, Rates(**rates, value_transforms="values"))
    assert [group["name"] for group in groups] == ["decay", "no_decay", "keys_and_values"]


def test_gates_of_memories_can_have_a_rate_of_their_own():
    memory = build("product-key", hidden_size=8, num_heads=2, n=4, k=2, query_norm="batch", gate="token")
    rates = {"learning_rate": 1e-3, "weight_decay": 0.1}
    groups = {group["name"]: group for group in parameter_groups(memory, Rates(**rates, gate_learning_rate=5e-5))}
    assert {name: names_in(memory, group) for name, group in groups.items()} == {
        "decay": {"query_projection.weight"},
        "no_decay": {"query_norm_weight", "query_norm_bias"},
        "gates": {"gate_weight"},
        "gates_no_decay": {"gate_bias"},
        "keys_and_values": {*KEYS, "value_bank"},
    }
    gates = [groups["gates"], groups["gates_no_decay"]]
    assert [(group["lr"], group["weight_decay"]) for group in gates] == [(5e-5, 0.1), (5e-5, 0)]
    assert {group["course"] for group in gates} == {"schedule"} and groups["decay"]["lr"] == 1e-3
    together = parameter_groups(memory, Rates(**rates, memory_learning_rate=2e-3, gate_learning_rate=5e-5))
    assert [group["name"] for group in together] == [
        *("memory", "memory_no_decay", "gates", "gates_no_decay", "keys_and_values")
    ]


def test_keys_may_follow_the_schedule_and_decay_as_weights_do(model):
    groups = parameter_groups(model, Rates(weight_decay=0.1, memory_keys="weights"))
    assert [(group["name"], group["course"]) for group in groups] == [
        ("decay", "schedule"),
        ("no_decay", "schedule"),
        ("values", "constant"),
    ]
    assert memory_parameters(model, KEYS) <= names_in(model, groups[0]) and groups[0]["weight_decay"] == 0.1
    assert names_in(model, groups[2]) == memory_parameters(model, ["value_bank"])
    groups = parameter_groups(model, Rates(memory_learning_rate=2e-3, memory_keys="weights"))
    assert names_in(model, groups[2]) == memory_parameters(model, [*KEYS, "value_transform"])
    assert (groups[2]["name"], groups[2]["lr"]) == ("memory", 2e-3)


def test_norms_and_biases_of_memories_with_a_rate_of_their_own_do_not_decay():
    memory = build("product-key", hidden_size=8, num_heads=2, n=4, k=2, query_norm="batch", gate="token")
    groups = parameter_groups(memory, Rates(memory_learning_rate=2e-3, weight_decay=0.1))
    assert {group["name"]: names_in(memory, group) for group in groups} == {
        "memory": {"query_projection.weight", "gate_weight"},
        "memory_no_decay": {"query_norm_weight", "query_norm_bias", "gate_bias"},
        "keys_and_values": {*KEYS, "value_bank"},
    }
    assert [(group["lr"], group["weight_decay"]) for group in groups[:2]] == [(2e-3, 0.1), (2e-3, 0)]


def test_values_decay_if_they_are_told_to_and_keys_do_not(model):
    groups = parameter_groups(model, Rates(value_weight_decay=0.1))
    assert [(group["name"], group["weight_decay"]) for group in groups[2:]] == [("keys", 0), ("values", 0.1)]


def test_no_parameter_is_in_two_groups_or_in_none_when_everything_trains(model):
    set_trainable(model, "all")
    grouped = [id(p) for group in parameter_groups(model, Rates(learning_rate=1e-3)) for p in group["params"]]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == {id(parameter) for parameter in model.parameters()}


def test_a_wrapper_that_renames_parameters_changes_no_group(model):
    inner = parameter_groups(model, Rates(learning_rate=1e-3))
    outer = parameter_groups(torch.nn.ModuleDict({"wrapped": model}), Rates(learning_rate=1e-3))
    assert [[id(p) for p in group["params"]] for group in outer] == [[id(p) for p in g["params"]] for g in inner]


def test_norms_within_memories_do_not_decay_though_they_have_a_row_a_head():
    memory = build("product-key", hidden_size=8, num_heads=2, n=4, k=2, query_norm="batch", gate="token")
    groups = parameter_groups(memory, Rates(learning_rate=1e-3, weight_decay=0.1))
    assert {group["name"]: names_in(memory, group) for group in groups} == {
        "decay": {"query_projection.weight", "gate_weight"},
        "no_decay": {"query_norm_weight", "query_norm_bias", "gate_bias"},
        "keys_and_values": {*KEYS, "value_bank"},
    }


def test_without_keys_and_values_there_is_no_group_for_them():
    groups = parameter_groups(torch.nn.Linear(2, 2), Rates(learning_rate=1e-3))
    assert [group["name"] for group in groups] == ["decay", "no_decay"]


def test_a_frozen_model_is_refused():
    with pytest.raises(ValueError, match=r"no parameter requires a gradient; call set_trainable on the model first."):
        parameter_groups(torch.nn.Linear(2, 2).requires_grad_(False), Rates(learning_rate=1e-3))


def test_scheduled_groups_follow_the_schedule_of_transformers_and_the_others_stay():
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    groups = [{"params": weights[:1], "course": "schedule"}, {"params": weights[1:], "course": "constant"}]
    optimizer = torch.optim.AdamW(groups, lr=0.5)
    reference_optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=0.5)
    scheduler = group_schedules(optimizer, Rates(warmup_ratio=0.15), total_steps=20)
    reference = get_cosine_schedule_with_warmup(reference_optimizer, 3, 20)
    rates = []
    for _ in range(21):
        rates.append(scheduler.get_last_lr())
        assert rates[-1] == [reference.get_last_lr()[0], 0.5]
        for stepped in (optimizer, reference_optimizer, scheduler, reference):
            stepped.step()
    scheduled = [rate for rate, _ in rates]
    assert scheduled[0] == 0 and max(scheduled) == scheduled[3] == 0.5 and scheduled[20] == 0


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (None, {0: 4.0, 1: 3.4, 4: 1.6, 5: 1.0, 6: 1.0, 15: 1.0, 20: 1.0}),
        (0.5, {0: 4.0, 4: 2.8, 10: 1.0, 15: 1.0, 20: 1.0}),
        (1.0, {0: 4.0, 4: 3.4, 10: 2.5, 15: 1.75, 20: 1.0}),
    ],
    ids=["as-in-the-paper", "half", "all"],
)
@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant_with_warmup"])
def test_values_can_fall_from_four_times_the_schedule_to_once(schedule, ratio, expected):
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    groups = [
        {"params": weights[:1], "lr": 0.5, "course": "schedule"},
        {"params": weights[1:], "lr": 3.0, "course": "4x-to-1x"},
    ]
    optimizer = torch.optim.AdamW(groups)
    rates = Rates(schedule=schedule, warmup_ratio=0.2, value_schedule="4x-to-1x", value_decay_ratio=ratio)
    scheduler = group_schedules(optimizer, rates, total_steps=20)
    multipliers = []
    for _ in range(21):
        main, values = scheduler.get_last_lr()
        multipliers.append((main / 0.5, values / 3.0))
        optimizer.step()
        scheduler.step()
    for step, factor in expected.items():
        main, values = multipliers[step]
        assert values == pytest.approx(factor * main)
    assert multipliers[0] == (0, 0) and multipliers[4] == (1, pytest.approx(expected[4]))
    end = 1 if schedule == "constant_with_warmup" else 0
    assert multipliers[20] == (pytest.approx(end), pytest.approx(end))

"""Parameter groups of the optimizer, and the course of each group's learning rate (MIDUS, appendix B.1)."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import SchedulerType, get_scheduler

from midus_hf.config.declared_tensors import Role
from midus_hf.memory.declared_module import DeclaredModule
from midus_hf.models.fetching import Banks
from midus_hf.models.host import MemoryModel
from midus_hf.training.optim.rates import VALUE_DECAY_RATIO, Rates
from midus_hf.training.optim.tensors import whole_shape

_COURSE_OF_VALUES = {"constant": "constant", "fixed": "schedule", "4x-to-1x": "4x-to-1x"}

# Name of the optimizer's group for blocks: it has no parameters, only the rate and the decay of blocks.
BLOCKS_GROUP = "blocks"


def parameter_groups(model: nn.Module, rates: Rates) -> list[dict[str, Any]]:
    """Split the parameters that train into groups for an optimizer.

    Keys and values of memories do not decay and keep one rate throughout, unless values have a decay or a schedule, or
    keys count as weights. Everything else follows the schedule; of these parameters, tensors of two or more dimensions
    decay, but not norms or biases. The memory modules themselves say which parameters are keys and values, so a wrapper
    that renames parameters changes no group.

    Args:
        model: A model with `requires_grad` set.
        rates: Rate and decay of each kind of tensor.

    Returns:
        Groups with `params`, `name`, `lr`, `weight_decay` and `course`. The groups are, in this order, `decay`,
        `no_decay`; `memory`, `memory_no_decay` if other memory tensors have a separate rate; `gates`, `gates_no_decay`
        if gates have a separate rate; `keys_and_values`, or `keys` and `values` if these differ. Groups without
        parameters are left out. Blocks of a bank are no parameters: if they train, a last group `blocks` has the rate
        and decay of values, and follows the schedule unless `rates.value_schedule` says otherwise. `course` is
        `"schedule"`, `"constant"` or `"4x-to-1x"`. Keys and values come late
        because a Trainer logs the rate of the first group.

    Raises:
        ValueError: If nothing trains.
    """
    group_of = _group_namer(model, rates)
    members: dict[str, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            members.setdefault(group_of(parameter), []).append(parameter)
    if banks_that_train(model):
        members[BLOCKS_GROUP] = []
    if not members:
        raise ValueError("no parameter requires a gradient; call set_trainable on the model first.")
    settings = _settings(rates)
    return [{"params": members[name], "name": name, **settings[name]} for name in settings if name in members]


def group_schedules(
    optimizer: torch.optim.Optimizer,
    total_steps: int,
    *,
    lr_scheduler_type: str = "cosine",
    warmup_steps: float = 0.1,
    lr_scheduler_kwargs: dict[str, Any] | None = None,
    value_decay_ratio: float | None = None,
) -> Any:
    """Return a scheduler under which each group takes its `course`: the schedule, a constant rate, or `"4x-to-1x"`.

    `"4x-to-1x"` is the schedule times a factor that falls linearly from 4 to 1 in the first `value_decay_ratio` of the
    steps. `"reduce_lr_on_plateau"` leaves groups of a constant rate at their rate.

    Args:
        optimizer: An optimizer built on `parameter_groups`.
        total_steps: Steps of the run.
        lr_scheduler_type: Name of a schedule of transformers that scales the maximum rate. Default: `"cosine"`.
        warmup_steps: Steps in which the rate rises from zero, or a share of all steps, rounded up, if below 1. Default:
            0.1.
        lr_scheduler_kwargs: Other arguments of the schedule, as in `TrainingArguments`. Default: None, no others.
        value_decay_ratio: Share of the steps in which the factor of `"4x-to-1x"` falls to 1. Default: None, as 0.25.

    Raises:
        ValueError: If the schedule does not scale the maximum rate.
    """
    kind = SchedulerType(lr_scheduler_type)
    courses = [group["course"] for group in optimizer.param_groups]
    if kind is SchedulerType.REDUCE_ON_PLATEAU and "4x-to-1x" not in courses:
        floors = [group["lr"] if group["course"] == "constant" else 0.0 for group in optimizer.param_groups]
        return get_scheduler(
            kind, optimizer, scheduler_specific_kwargs={"min_lr": floors, **(lr_scheduler_kwargs or {})}
        )
    warmup = math.ceil(warmup_steps * total_steps) if warmup_steps < 1 else int(warmup_steps)
    probe = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = get_scheduler(kind, probe, warmup, total_steps, scheduler_specific_kwargs=lr_scheduler_kwargs)
    if not isinstance(scheduler, LambdaLR):
        raise ValueError(
            f"lr_scheduler_type is {kind.value!r}, whose rate is no multiple of each group's maximum rate; expected one that scales "
            f"it, such as cosine{', or another value_schedule' if kind is SchedulerType.REDUCE_ON_PLATEAU else ''}."
        )
    factor, falling_steps = scheduler.lr_lambdas[0], (value_decay_ratio or VALUE_DECAY_RATIO) * total_steps
    factors: dict[str, Callable[[int], float]] = {
        "schedule": factor,
        "constant": lambda step: 1.0,
        "4x-to-1x": lambda step: factor(step) * (4 - 3 * min(step / falling_steps, 1)),
    }
    return LambdaLR(optimizer, [factors[course] for course in courses])


def _group_namer(model: nn.Module, rates: Rates) -> Callable[[nn.Parameter], str]:
    """Return a function that names the group of a parameter."""
    value_roles: tuple[Role, ...] = ("value", "transform") if rates.value_transforms == "values" else ("value",)
    keys, values = _ids_of(model, "key"), _ids_of(model, *value_roles)
    gates = _ids_of(model, "gate")
    norms = _ids_of(model, "norm")  # norms with a row per head have two dimensions, but do not decay either
    other_tensors = _ids_of(model, "projection", "norm", "gate", "router", "transform") - values
    if rates.memory_keys == "weights":
        keys, other_tensors = set(), other_tensors | keys
    share_a_group = (
        rates.memory_keys == "constant"
        and rates.value_learning_rate is None
        and rates.value_schedule in (None, "constant")
        and not rates.value_weight_decay
    )

    def name_of(parameter: nn.Parameter) -> str:
        if id(parameter) in keys | values:
            return "keys_and_values" if share_a_group else "values" if id(parameter) in values else "keys"
        decays = len(whole_shape(parameter)) > 1 and id(parameter) not in norms
        if rates.gate_learning_rate is not None and id(parameter) in gates:
            return "gates" if decays else "gates_no_decay"
        if rates.memory_learning_rate is not None and id(parameter) in other_tensors:
            return "memory" if decays else "memory_no_decay"
        return "decay" if decays else "no_decay"

    return name_of


def _settings(rates: Rates) -> dict[str, dict[str, Any]]:
    """Return the rate, decay and course of each group, in the order of groups."""
    memory_rate = rates.learning_rate if rates.memory_learning_rate is None else rates.memory_learning_rate
    gate_rate = memory_rate if rates.gate_learning_rate is None else rates.gate_learning_rate
    key_rate = rates.learning_rate if rates.key_value_learning_rate is None else rates.key_value_learning_rate
    value_rate = key_rate if rates.value_learning_rate is None else rates.value_learning_rate
    value_course = _COURSE_OF_VALUES[rates.value_schedule or "constant"]
    block_course = _COURSE_OF_VALUES[rates.value_schedule or "fixed"]
    return {
        "decay": {"lr": rates.learning_rate, "weight_decay": rates.weight_decay, "course": "schedule"},
        "no_decay": {"lr": rates.learning_rate, "weight_decay": 0.0, "course": "schedule"},
        "memory": {"lr": memory_rate, "weight_decay": rates.weight_decay, "course": "schedule"},
        "memory_no_decay": {"lr": memory_rate, "weight_decay": 0.0, "course": "schedule"},
        "gates": {"lr": gate_rate, "weight_decay": rates.weight_decay, "course": "schedule"},
        "gates_no_decay": {"lr": gate_rate, "weight_decay": 0.0, "course": "schedule"},
        "keys_and_values": {"lr": key_rate, "weight_decay": 0.0, "course": "constant"},
        "keys": {"lr": key_rate, "weight_decay": 0.0, "course": "constant"},
        "values": {"lr": value_rate, "weight_decay": rates.value_weight_decay, "course": value_course},
        BLOCKS_GROUP: {"lr": value_rate, "weight_decay": rates.value_weight_decay, "course": block_course},
    }


def _ids_of(model: nn.Module, *roles: Role) -> set[int]:
    """Return the ids of the parameters that have one of the roles in a memory."""
    return {
        id(module.declared_tensor(name))
        for module in model.modules()
        if isinstance(module, DeclaredModule)
        for name in module.names_of(*roles)
    }


def banks_that_train(model: torch.nn.Module) -> list[Banks]:
    """Return the banks of a model, wrapped by PEFT or not, whose blocks train."""
    modules = (module for module in model.modules() if isinstance(module, MemoryModel))
    return [module.own_banks for module in modules if module.own_banks.layouts and module.own_banks.trainable]

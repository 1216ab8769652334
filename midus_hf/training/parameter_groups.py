"""The optimizer's parameter groups, and the course of each group's learning rate (MIDUS, appendix B.1)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from midus_config.declared_tensors import Role
from midus_hf.memory.declared_module import DeclaredModule
from midus_hf.training.options import ValueSchedule, ValueTransforms, check_one_of

_COURSE_OF_VALUES = {"constant": "constant", "fixed": "schedule", "4x-to-1x": "4x-to-1x"}


def parameter_groups(
    model: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float = 0.0,
    key_value_learning_rate: float | None = None,
    value_learning_rate: float | None = None,
    value_schedule: ValueSchedule = "constant",
    value_transforms: ValueTransforms = "weights",
) -> list[dict[str, Any]]:
    """Split the parameters that train into groups for an optimizer.

    Keys and values of memories do not decay and keep one rate throughout, unless values have a schedule; everything
    else follows the schedule. What decays are its tensors of two or more dimensions: not norms, not biases. Which
    parameters are keys and values is asked of the memory modules, so a wrapper that renames parameters changes no
    group.

    Args:
        model: With `requires_grad` set.
        learning_rate: Maximum rate of everything but keys and values.
        weight_decay: Decay of matrices. Default: 0.
        key_value_learning_rate: Default: `learning_rate`.
        value_learning_rate: Rate of the values, which then have a group of their own. Default:
            `key_value_learning_rate`.
        value_schedule: As in `TrainConfig`; values have a group of their own unless it is `"constant"`. Default:
            `"constant"`.
        value_transforms: Whether the W_h of HIVE are `"weights"`, which follow the schedule and decay, or `"values"`,
            which stand in the group of those; see `TrainConfig`. Default: `"weights"`.

    Returns:
        Groups with `params`, `name`, `lr`, `weight_decay` and `course`, in this order: `decay`, `no_decay`, and
        `keys_and_values` or `keys`, `values`. Groups without parameters are left out. `course` is `"schedule"`,
        `"constant"` or `"4x-to-1x"`. What is no key or value stands first, since a Trainer logs the rate of the first
        group.

    Raises:
        ValueError: If nothing trains, or `value_schedule` or `value_transforms` is not one of those named.
    """
    check_one_of("value_schedule", value_schedule, ValueSchedule)
    check_one_of("value_transforms", value_transforms, ValueTransforms)
    key_value_learning_rate = learning_rate if key_value_learning_rate is None else key_value_learning_rate
    together = value_learning_rate is None and value_schedule == "constant"
    value_learning_rate = key_value_learning_rate if value_learning_rate is None else value_learning_rate
    key_ids, value_ids = _key_and_value_ids(model, with_transforms=value_transforms == "values")
    norm_ids = _ids_of(model, "norm")  # they have a row per head, and still do not decay
    members: dict[str, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in key_ids | value_ids:
            own_group = "values" if id(parameter) in value_ids else "keys"
            name = "keys_and_values" if together else own_group
        else:
            name = "decay" if parameter.dim() > 1 and id(parameter) not in norm_ids else "no_decay"
        members.setdefault(name, []).append(parameter)
    if not members:
        raise ValueError("no parameter requires a gradient; call set_trainable on the model first.")

    settings: dict[str, dict[str, Any]] = {
        "decay": {"lr": learning_rate, "weight_decay": weight_decay, "course": "schedule"},
        "no_decay": {"lr": learning_rate, "weight_decay": 0.0, "course": "schedule"},
        "keys_and_values": {"lr": key_value_learning_rate, "weight_decay": 0.0, "course": "constant"},
        "keys": {"lr": key_value_learning_rate, "weight_decay": 0.0, "course": "constant"},
        "values": {"lr": value_learning_rate, "weight_decay": 0.0, "course": _COURSE_OF_VALUES[value_schedule]},
    }
    return [{"params": members[name], "name": name, **settings[name]} for name in settings if name in members]


def group_schedules(optimizer: torch.optim.Optimizer, schedule: str, warmup_steps: int, total_steps: int) -> LambdaLR:
    """A scheduler under which each group takes its `course`: `schedule`, a constant rate, or `schedule` from 4x to 1x.

    That is the schedule times a factor that falls linearly from 4 to 1 over the run.

    Args:
        optimizer: Built on `parameter_groups`.
        schedule: The name of one of transformers' schedules that scale the maximum rate, such as `"cosine"`.
        warmup_steps: Steps in which the rate rises from zero.
        total_steps: Steps of the run.
    """
    factor = _schedule_factor(schedule, warmup_steps, total_steps)

    def falling(step: int) -> float:
        return factor(step) * (4 - 3 * min(step / total_steps, 1))

    courses = {"schedule": factor, "constant": _constant, "4x-to-1x": falling}
    return LambdaLR(optimizer, [courses[group["course"]] for group in optimizer.param_groups])


def _key_and_value_ids(model: nn.Module, with_transforms: bool) -> tuple[set[int], set[int]]:
    """Ids of the parameters that are keys, and of those that are values, or count as such."""
    values: tuple[Role, ...] = ("value", "transform") if with_transforms else ("value",)
    return _ids_of(model, "key"), _ids_of(model, *values)


def _ids_of(model: nn.Module, *roles: Role) -> set[int]:
    """Ids of the parameters that have one of the roles in a memory."""
    return {
        id(module.get_parameter(name))
        for module in model.modules()
        if isinstance(module, DeclaredModule)
        for name in module.names_of(*roles)
    }


def _constant(step: int) -> float:
    return 1.0


def _schedule_factor(schedule: str, warmup_steps: int, total_steps: int) -> Callable[[int], float]:
    """Transformers' schedule as a function of the step, taken from a scheduler of an optimizer made for that."""
    probe = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = get_scheduler(schedule, probe, num_warmup_steps=warmup_steps, num_training_steps=total_steps)
    assert isinstance(scheduler, LambdaLR), f"{schedule} does not scale the maximum rate"
    return scheduler.lr_lambdas[0]

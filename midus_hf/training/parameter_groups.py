"""The optimizer's parameter groups, and the course of each group's learning rate (MIDUS, appendix B.1)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from midus_hf.memory.registry import MemoryModule


def parameter_groups(
    model: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float = 0.0,
    key_value_learning_rate: float | None = None,
    value_learning_rate: float | None = None,
) -> list[dict[str, Any]]:
    """Split the parameters that train into groups for an optimizer.

    Keys and values of memories keep one rate throughout and do not decay; everything else follows the schedule. What
    decays are its tensors of two or more dimensions: not norms, not biases. Which parameters are keys and values is
    asked of the memory modules, so a wrapper that renames parameters changes no group.

    Args:
        model: With `requires_grad` set.
        learning_rate: Maximum rate of everything but keys and values.
        weight_decay: Decay of matrices. Default: 0.
        key_value_learning_rate: Default: `learning_rate`.
        value_learning_rate: Rate of the values, which then have a group of their own. Default:
            `key_value_learning_rate`.

    Returns:
        Groups with `params`, `name`, `lr`, `weight_decay` and `scheduled`, in this order: `decay`, `no_decay`, and
        `keys_and_values` or `keys`, `values`. Groups without parameters are left out. Those that follow the schedule
        stand first, since a Trainer logs the rate of the first group.

    Raises:
        ValueError: If nothing trains.
    """
    key_value_learning_rate = learning_rate if key_value_learning_rate is None else key_value_learning_rate
    key_ids, value_ids = _key_and_value_ids(model)
    members: dict[str, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in key_ids | value_ids:
            own_group = "values" if id(parameter) in value_ids else "keys"
            name = "keys_and_values" if value_learning_rate is None else own_group
        else:
            name = "decay" if parameter.dim() > 1 else "no_decay"
        members.setdefault(name, []).append(parameter)
    if not members:
        raise ValueError("no parameter requires a gradient; call set_trainable on the model first.")

    settings: dict[str, dict[str, Any]] = {
        "decay": {"lr": learning_rate, "weight_decay": weight_decay, "scheduled": True},
        "no_decay": {"lr": learning_rate, "weight_decay": 0.0, "scheduled": True},
        "keys_and_values": {"lr": key_value_learning_rate, "weight_decay": 0.0, "scheduled": False},
        "keys": {"lr": key_value_learning_rate, "weight_decay": 0.0, "scheduled": False},
        "values": {"lr": value_learning_rate, "weight_decay": 0.0, "scheduled": False},
    }
    return [{"params": members[name], "name": name, **settings[name]} for name in settings if name in members]


def group_schedules(optimizer: torch.optim.Optimizer, schedule: str, warmup_steps: int, total_steps: int) -> LambdaLR:
    """A scheduler under which the groups marked `scheduled` follow `schedule` and the others keep their rate.

    Args:
        optimizer: Built on `parameter_groups`.
        schedule: The name of one of transformers' schedules that scale the maximum rate, such as `"cosine"`.
        warmup_steps: Steps in which the rate rises from zero.
        total_steps: Steps of the run.
    """
    factor = _schedule_factor(schedule, warmup_steps, total_steps)
    return LambdaLR(optimizer, [factor if group["scheduled"] else _constant for group in optimizer.param_groups])


def _key_and_value_ids(model: nn.Module) -> tuple[set[int], set[int]]:
    """Ids of the parameters that are keys, and of those that are values."""
    key_ids: set[int] = set()
    value_ids: set[int] = set()
    for module in model.modules():
        if isinstance(module, MemoryModule):
            for name in module.key_value_parameters:
                (value_ids if name in module.value_parameters else key_ids).add(id(getattr(module, name)))
    return key_ids, value_ids


def _constant(step: int) -> float:
    return 1.0


def _schedule_factor(schedule: str, warmup_steps: int, total_steps: int) -> Callable[[int], float]:
    """Transformers' schedule as a function of the step, taken from a scheduler of an optimizer made for that."""
    probe = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = get_scheduler(schedule, probe, num_warmup_steps=warmup_steps, num_training_steps=total_steps)
    assert isinstance(scheduler, LambdaLR), f"{schedule} does not scale the maximum rate"
    return scheduler.lr_lambdas[0]

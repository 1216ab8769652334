"""Parameter groups of the optimizer, and the schedule of each group's learning rate (MIDUS, appendix B.1)."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import SchedulerType, get_scheduler

from midus_hf.config.declared_tensors import Role
from midus_hf.config.errors import RequestError
from midus_hf.memories.hierarchical.training import BLOCKS_GROUP, model_banks
from midus_hf.memories.tables import DeclaredModule
from midus_hf.training.optim.rates import Rates

# Share of the steps in which the schedule `4x-to-1x` decreases (UltraMemV2, appendix E.6).
_FALLING_SHARE = 0.25


def parameter_groups(model: nn.Module, rates: Rates) -> list[dict[str, Any]]:
    """Split the trained parameters into groups for an optimizer.

    Keys and values of memories do not decay and keep one rate throughout, unless values have a decay or a schedule, or
    keys count as weights. Everything else follows the schedule; of these parameters, tensors of two or more dimensions
    decay, but not norms or biases. The memory modules
    themselves say which parameters are keys and values, so a wrapper that renames parameters changes no group.

    Args:
        model: A model with `requires_grad` set.
        rates: Rate and decay of each kind of tensor.

    Returns:
        Groups with `params`, `name`, `lr`, `weight_decay` and `schedule`. The groups are, in this order, `decay`,
        `no_decay`; `memory`, `memory_no_decay` if other memory tensors have a separate rate; `keys`; `values`. Groups
        without parameters are left out. Blocks of a bank are not parameters: if they are trained, a last group `blocks` has the
        rate and decay of values, and follows the schedule unless `rates.value_schedule` says otherwise. `schedule` is
        `"fixed"` (the run's), `"constant"` or `"4x-to-1x"`. Keys and values come late because a Trainer logs the rate of
        the first group.

    Raises:
        RequestError: If nothing is trained.
    """
    role_of: dict[int, Role] = {
        id(module.declared_tensor(name)): tensor.role
        for module in model.modules()
        if isinstance(module, DeclaredModule)
        for name, tensor in module.declared.items()
    }
    rate = rates.learning_rate
    memory_rate = rate if rates.memory_learning_rate is None else rates.memory_learning_rate
    key_rate = rate if rates.key_value_learning_rate is None else rates.key_value_learning_rate
    value_rate = key_rate if rates.value_learning_rate is None else rates.value_learning_rate
    settings = {
        "decay": (rate, rates.weight_decay, "fixed"),
        "no_decay": (rate, 0.0, "fixed"),
        "memory": (memory_rate, rates.weight_decay, "fixed"),
        "memory_no_decay": (memory_rate, 0.0, "fixed"),
        "keys": (key_rate, 0.0, "constant"),
        "values": (value_rate, rates.value_weight_decay, rates.value_schedule or "constant"),
        BLOCKS_GROUP: (value_rate, rates.value_weight_decay, rates.value_schedule or "fixed"),
    }
    members: dict[str, list[nn.Parameter]] = {name: [] for name in settings}
    for parameter in model.parameters():
        role = role_of.get(id(parameter))
        if not parameter.requires_grad:
            continue
        if role == "value":
            members["values"].append(parameter)
        elif role == "key" and rates.memory_keys == "constant":
            members["keys"].append(parameter)
        else:
            # Norms with a row per head have two dimensions, but do not decay either; ZeRO-3 cuts matrices to vectors.
            is_matrix = len(getattr(parameter, "ds_shape", parameter.shape)) > 1 and role != "norm"
            kind = "decay" if is_matrix else "no_decay"
            if role is not None and rates.memory_learning_rate is not None:
                kind = "memory" if kind == "decay" else "memory_no_decay"
            members[kind].append(parameter)
    groups = [
        {"params": members[name], "name": name, "lr": lr, "weight_decay": weight_decay, "schedule": schedule}
        for name, (lr, weight_decay, schedule) in settings.items()
        if members[name] or (name == BLOCKS_GROUP and any(bank.trainable for bank in model_banks(model)))
    ]
    if not groups:
        raise RequestError("no parameter requires a gradient; call set_trainable on the model first.")
    return groups


def group_schedules(
    optimizer: torch.optim.Optimizer,
    total_steps: int,
    *,
    lr_scheduler_type: str = "cosine",
    warmup_steps: float = 0.1,
    lr_scheduler_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Return a scheduler with one schedule per group: the run's schedule, a constant rate, or `"4x-to-1x"`.

    `"4x-to-1x"` is the schedule times a factor that decreases linearly from 4 to 1 in the first quarter of the steps.
    `"reduce_lr_on_plateau"` does not change groups with a constant rate.

    Args:
        optimizer: An optimizer built on `parameter_groups`.
        total_steps: Steps of the run.
        lr_scheduler_type: Name of a schedule of transformers that scales the maximum rate. Default: `"cosine"`.
        warmup_steps: Steps in which the rate rises from zero, or a share of all steps, rounded up, if below 1. Default:
            0.1.
        lr_scheduler_kwargs: Other arguments of the schedule, as in `TrainingArguments`. Default: None, no others.

    Raises:
        RequestError: If the schedule does not scale the maximum rate.
    """
    kind = SchedulerType(lr_scheduler_type)
    schedules = [group["schedule"] for group in optimizer.param_groups]
    if kind is SchedulerType.REDUCE_ON_PLATEAU and "4x-to-1x" not in schedules:
        floors = [group["lr"] if group["schedule"] == "constant" else 0.0 for group in optimizer.param_groups]
        return get_scheduler(
            kind, optimizer, scheduler_specific_kwargs={"min_lr": floors, **(lr_scheduler_kwargs or {})}
        )
    warmup = math.ceil(warmup_steps * total_steps) if warmup_steps < 1 else int(warmup_steps)
    probe = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = get_scheduler(kind, probe, warmup, total_steps, scheduler_specific_kwargs=lr_scheduler_kwargs)
    if not isinstance(scheduler, LambdaLR):
        raise RequestError(
            f"lr_scheduler_type is {kind.value!r}, whose rate is no multiple of each group's maximum rate; expected one that scales "
            f"it, such as cosine{', or another value_schedule' if kind is SchedulerType.REDUCE_ON_PLATEAU else ''}."
        )
    factor, falling_steps = scheduler.lr_lambdas[0], _FALLING_SHARE * total_steps
    factors: dict[str, Callable[[int], float]] = {
        "fixed": factor,
        "constant": lambda step: 1.0,
        "4x-to-1x": lambda step: factor(step) * (4 - 3 * min(step / falling_steps, 1)),
    }
    return LambdaLR(optimizer, [factors[schedule] for schedule in schedules])

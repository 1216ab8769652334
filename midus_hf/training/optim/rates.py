"""Learning rates and weight decays of each kind of tensor, and the schedules that rates of memories can take."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from midus_hf.config.errors import RequestError

# Schedules that the rate of memory values can take: see `Rates`.
ValueSchedule = Literal["constant", "fixed", "4x-to-1x"]

# Kinds of tensor that memory keys can be trained as: see `Rates`.
MemoryKeys = Literal["constant", "weights"]


def short_run_rates(rate: float) -> dict[str, float]:
    """Return the rates of new parameters in a short run, as keys of `Rates`: ten times the rate for values, which start at zero."""
    values = float(f"{10 * rate:.15g}")  # rounded, so that ten times 3e-4 is 0.003
    return {"learning_rate": rate, "value_learning_rate": values}


def trains_new_parts(keys: Mapping[str, Any], recorded: str | None) -> bool:
    """Return whether only adapters or new parts are trained, which need higher rates; `recorded` is the record of `upscale`."""
    if keys.get("adapters") is not None:
        return True
    trainable = keys.get("trainable", "auto")
    if trainable == "auto":
        trainable = recorded
    # A list of roles names tensors of added memories; a list of numbers may name layers of the base.
    return trainable == "new" or (isinstance(trainable, list) and all(isinstance(part, str) for part in trainable))


@dataclasses.dataclass
class Rates:
    """Learning rate and weight decay of each kind of tensor.

    Args:
        learning_rate: Maximum rate of everything without a separate rate. Default: 1e-4.
        memory_learning_rate: Maximum rate of a memory's projections, norms, routers, gates and transforms; follows the
            schedule. Default: `learning_rate`.
        key_value_learning_rate: Rate of memory keys and values, constant. Default: `learning_rate`.
        value_learning_rate: Rate of memory values alone. Default: `key_value_learning_rate`.
        value_schedule: Schedule of the rate of values. `"constant"`: as for keys (MIDUS). `"fixed"`: with warm-up and
            schedule (Memory Layers at Scale, Mixture of Chapters). `"4x-to-1x"`: `"fixed"` times a factor that falls
            linearly from 4 to 1 in the first quarter of the steps (UltraMemV2, appendix E.6: 350 billion of 1.4 trillion
            tokens). Default: `"constant"` for values in the model, `"fixed"` for blocks of a bank (hierarchical
            memories, appendix A.2).
        memory_keys: Training of keys. `"constant"`: at one rate, without decay (MIDUS). `"weights"`: with schedule and
            decay (Memory Layers at Scale, UltraMemV2). Default: `"constant"`.
        weight_decay: Decay of matrices. Norms and biases have none, nor do constant keys. Default: 0.
        value_weight_decay: Decay of memory values. Default: 0.

    Raises:
        RequestError: If a value lies outside its range.
    """

    learning_rate: float = 1e-4
    memory_learning_rate: float | None = None
    key_value_learning_rate: float | None = None
    value_learning_rate: float | None = None
    value_schedule: ValueSchedule | None = None
    memory_keys: MemoryKeys = "constant"
    weight_decay: float = 0.0
    value_weight_decay: float = 0.0

    def __post_init__(self) -> None:
        schedules = (*get_args(ValueSchedule), None)
        for name, choices in (("value_schedule", schedules), ("memory_keys", get_args(MemoryKeys))):
            if getattr(self, name) not in choices:
                expected = ", ".join(map(repr, choices))
                raise RequestError(f"{name} is {getattr(self, name)!r}; expected one of {expected}.")
        for name in (field.name for field in dataclasses.fields(Rates) if field.name.endswith(("rate", "decay"))):
            value, is_rate = getattr(self, name), name.endswith("rate")
            if value is not None and value <= 0 and (is_rate or value < 0):
                raise RequestError(f"{name} is {value}; expected {'a number above 0' if is_rate else '0 or more'}.")

"""Learning rates and weight decays of a run, and how the rates change over the run."""

import dataclasses
import math
from typing import Any, Literal, get_args

# Courses that the rate of memory values can take: see `Rates`.
ValueSchedule = Literal["constant", "fixed", "4x-to-1x"]

# Kinds of tensor that value transforms can be trained as: see `Rates`.
ValueTransforms = Literal["weights", "values"]

# Kinds of tensor that memory keys can be trained as: see `Rates`.
MemoryKeys = Literal["constant", "weights"]

# Default share of the steps in which the rate of values falls from 4x to 1x.
VALUE_DECAY_RATIO = 0.25

# Courses that the rate of all other tensors can take: see `Rates`.
Schedule = Literal["cosine", "linear", "constant_with_warmup", "warmup_stable_decay"]


@dataclasses.dataclass(kw_only=True)
class Rates:
    """Learning rate and weight decay of each kind of tensor, and the course of the rates over a run.

    Args:
        learning_rate: Maximum rate of everything without a separate rate. Default: 1e-4.
        memory_learning_rate: Maximum rate of a memory's projections, norms, routers, gates and transforms; follows the
            schedule. Default: `learning_rate`.
        gate_learning_rate: Maximum rate of a memory's gates, which scale what is retrieved or let heads begin to read
            the depth; follows the schedule. Default: `memory_learning_rate`.
        key_value_learning_rate: Rate of memory keys and values, constant. Default: `learning_rate`.
        value_learning_rate: Rate of memory values alone. Default: `key_value_learning_rate`.
        value_schedule: Course of the rate of values. `"constant"`: as for keys (MIDUS). `"fixed"`: with warm-up and
            schedule (Memory Layers at Scale, Mixture of Chapters). `"4x-to-1x"`: `"fixed"` times a factor that falls
            linearly from 4 to 1 (UltraMemV2, appendix E.6). Default: `"constant"`.
        value_decay_ratio: Share of the steps, from the first, in which the factor of `"4x-to-1x"` falls; then it is 1.
            Default: 0.25, as in the paper (350 billion of 1.4 trillion tokens).
        value_transforms: Training of tensors that make values from others (W_h of HIVE, second factor of a bank of
            chapters). `"weights"`: with schedule and decay (MIDUS, B.1). `"values"`: like values (MIDUS, F.3). Default:
            `"weights"`.
        memory_keys: Training of keys. `"constant"`: at one rate, without decay (MIDUS). `"weights"`: with schedule and
            decay (Memory Layers at Scale, UltraMemV2). Default: `"constant"`.
        weight_decay: Decay of matrices. Norms and biases have none, nor do constant keys. Default: 0.
        value_weight_decay: Decay of memory values. Default: 0.
        warmup_ratio: Share of the steps in which the rate rises from zero. Default: 0.1.
        lr_scheduler_type: Course of the rate after the warm-up: `"cosine"` or `"linear"` to zero,
            `"constant_with_warmup"`, or `"warmup_stable_decay"`, constant and then down along a cosine. Default:
            `"cosine"`.
        decay_ratio: Share of the steps, at the end, in which the rate of `"warmup_stable_decay"` falls; required by this
            schedule, and refused by all others.
        min_learning_rate_ratio: Final rate of `"cosine"` or `"warmup_stable_decay"`, as a share of the maximum rate. The
            warm-up of `"warmup_stable_decay"` also begins at this rate. Default: 0.

    Raises:
        ValueError: If a value lies outside its range, or is set for a schedule that does not use it.
    """

    learning_rate: float = 1e-4
    memory_learning_rate: float | None = None
    gate_learning_rate: float | None = None
    key_value_learning_rate: float | None = None
    value_learning_rate: float | None = None
    value_schedule: ValueSchedule = "constant"
    value_decay_ratio: float | None = None
    value_transforms: ValueTransforms = "weights"
    memory_keys: MemoryKeys = "constant"
    weight_decay: float = 0.0
    value_weight_decay: float = 0.0
    warmup_ratio: float = 0.1
    lr_scheduler_type: Schedule = "cosine"
    decay_ratio: float | None = None
    min_learning_rate_ratio: float = 0.0

    def __post_init__(self) -> None:
        for name, choices in (
            ("value_schedule", ValueSchedule),
            ("value_transforms", ValueTransforms),
            ("memory_keys", MemoryKeys),
            ("lr_scheduler_type", Schedule),
        ):
            _check_one_of(name, getattr(self, name), choices)
        for name in (
            "learning_rate",
            "memory_learning_rate",
            "gate_learning_rate",
            "key_value_learning_rate",
            "value_learning_rate",
        ):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}; expected a number above 0.")
        for name in ("weight_decay", "value_weight_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected 0 or more.")
        if not 0 <= self.warmup_ratio < 1:
            raise ValueError(f"warmup_ratio is {self.warmup_ratio}; expected a share of the steps, 0 <= ratio < 1.")
        if self.value_decay_ratio is not None:
            if self.value_schedule != "4x-to-1x":
                raise ValueError(
                    f"value_decay_ratio is {self.value_decay_ratio}, which value_schedule {self.value_schedule!r} does not take; "
                    "leave it out, or set value_schedule: 4x-to-1x."
                )
            if not 0 < self.value_decay_ratio <= 1:
                raise ValueError(
                    f"value_decay_ratio is {self.value_decay_ratio}; expected a share of the steps, 0 < ratio <= 1, such as 0.25."
                )
        self._check_end_of_schedule()

    def _check_end_of_schedule(self) -> None:
        if self.lr_scheduler_type == "warmup_stable_decay":
            if self.decay_ratio is None:
                raise ValueError(
                    "lr_scheduler_type is 'warmup_stable_decay', which needs decay_ratio, the share of the steps in which the rate "
                    "falls; set it, such as decay_ratio: 0.15."
                )
            if not 0 < self.decay_ratio <= 1 - self.warmup_ratio:
                raise ValueError(
                    f"decay_ratio is {self.decay_ratio}; expected a share of the steps, 0 < ratio <= 1 - warmup_ratio = "
                    f"{1 - self.warmup_ratio:g}."
                )
        elif self.decay_ratio is not None:
            raise ValueError(
                f"decay_ratio is {self.decay_ratio}, which lr_scheduler_type {self.lr_scheduler_type!r} does not take; leave it out, "
                "or set lr_scheduler_type: warmup_stable_decay."
            )
        if not 0 <= self.min_learning_rate_ratio < 1:
            raise ValueError(
                f"min_learning_rate_ratio is {self.min_learning_rate_ratio}; expected a share of the maximum rate, "
                "0 <= ratio < 1."
            )
        if self.min_learning_rate_ratio and self.lr_scheduler_type not in ("cosine", "warmup_stable_decay"):
            raise ValueError(
                f"min_learning_rate_ratio is {self.min_learning_rate_ratio}, which lr_scheduler_type {self.lr_scheduler_type!r} "
                "does not take; leave it out, or set lr_scheduler_type: cosine or warmup_stable_decay."
            )

    @property
    def scheduler_type(self) -> str:
        """Name of the schedule in transformers."""
        return (
            "cosine_with_min_lr"
            if self.lr_scheduler_type == "cosine" and self.min_learning_rate_ratio
            else self.lr_scheduler_type
        )

    def scheduler_options(self, total_steps: int) -> dict[str, Any]:
        """Return the arguments that transformers' schedule takes beside the steps of the warm-up and of the run."""
        if self.lr_scheduler_type == "warmup_stable_decay":
            assert self.decay_ratio is not None
            # Warm-up steps are rounded up: the decay must fit into the steps that remain.
            most = total_steps - self.warmup_steps(total_steps)
            decay_steps = min(round(self.decay_ratio * total_steps), most)
            return {"num_decay_steps": decay_steps, "min_lr_ratio": self.min_learning_rate_ratio}
        return {"min_lr_rate": self.min_learning_rate_ratio} if self.scheduler_type == "cosine_with_min_lr" else {}

    def warmup_steps(self, total_steps: int) -> int:
        """Return the number of steps in which the rate rises, rounded up as the Trainer rounds it."""
        return math.ceil(self.warmup_ratio * total_steps)


def _check_one_of(name: str, value: object, choices: Any) -> None:
    if value not in get_args(choices):
        expected = ", ".join(map(repr, get_args(choices)))
        raise ValueError(f"{name} is {value!r}; expected one of {expected}.")

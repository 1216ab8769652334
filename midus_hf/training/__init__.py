"""Continual pretraining: which layers train, at which rates, on which text, and the run that does it.

Each name is imported on first use: preparing a model for another trainer needs neither the Trainer nor PEFT.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from midus_hf.training.arguments import MemoryArguments, TrainArguments
    from midus_hf.training.checkpoints import load_checkpoint
    from midus_hf.training.optim.freezing import TrainableReport, set_trainable
    from midus_hf.training.optim.lora import lora_config
    from midus_hf.training.optim.parameter_groups import group_schedules, parameter_groups
    from midus_hf.training.optim.rates import Rates
    from midus_hf.training.run import TrainResult, train
    from midus_hf.training.trainer import MemoryTrainer, TrainsMemory

_MODULE_OF = {
    "MemoryArguments": "arguments",
    "MemoryTrainer": "trainer",
    "Rates": "optim.rates",
    "TrainArguments": "arguments",
    "TrainResult": "run",
    "TrainableReport": "optim.freezing",
    "TrainsMemory": "trainer",
    "group_schedules": "optim.parameter_groups",
    "load_checkpoint": "checkpoints",
    "lora_config": "optim.lora",
    "parameter_groups": "optim.parameter_groups",
    "set_trainable": "optim.freezing",
    "train": "run",
}

__all__ = [
    "MemoryArguments",
    "MemoryTrainer",
    "Rates",
    "TrainArguments",
    "TrainResult",
    "TrainableReport",
    "TrainsMemory",
    "group_schedules",
    "load_checkpoint",
    "lora_config",
    "parameter_groups",
    "set_trainable",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

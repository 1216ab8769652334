"""Continual pretraining: which layers train, at which rates, on which text, and the run that does it.

Each name is imported on first use: preparing a model for another trainer needs neither the Trainer nor PEFT.
"""

import importlib
from typing import Any

_MODULE_OF = {
    "MemoryArguments": "arguments",
    "MemoryTrainer": "trainer",
    "Rates": "optim.rates",
    "RunInterrupted": "callbacks",
    "TrainArguments": "arguments",
    "TrainResult": "run",
    "TrainableReport": "optim.freezing",
    "TrainsMemory": "trainer",
    "group_schedules": "optim.parameter_groups",
    "load_checkpoint": "checkpoints",
    "lora_config": "adapters",
    "parameter_groups": "optim.parameter_groups",
    "set_trainable": "optim.freezing",
    "train": "run",
}

__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Continual pretraining: trained layers, their rates, texts and the run.

Names are imported on first use: preparing a model for another trainer needs neither the Trainer nor PEFT.
"""

import importlib
from typing import Any

_NAMES = {
    "adapters": ("lora_config",),
    "arguments": ("MemoryArguments", "TrainArguments"),
    "checkpoints": ("load_checkpoint",),
    "keys": ("Rates",),
    "optim": ("TrainableReport", "group_schedules", "parameter_groups", "set_trainable"),
    "run": ("RunInterrupted", "TrainResult", "TrainingError", "run_training"),
    "trainer": ("MemoryTrainer", "MemoryTrainerMixin"),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

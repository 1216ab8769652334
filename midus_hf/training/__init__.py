"""Continual pretraining: which layers train, at which rates, on which text, and the run that does it.

Each name is imported on first use: reading the options of a run needs no torch, and preparing a model for another
trainer needs neither the Trainer nor PEFT.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from midus_hf.training.optim.freezing import TrainableReport, set_trainable
    from midus_hf.training.optim.lora import lora_config
    from midus_hf.training.optim.parameter_groups import group_schedules, parameter_groups
    from midus_hf.training.optim.rates import Rates
    from midus_hf.training.options import CorpusOptions, TrainConfig, WeightedCorpus
    from midus_hf.training.run.train import train
    from midus_hf.training.run.training_run import TrainResult
    from midus_hf.training.run_options import RunOptions
    from midus_hf.training.trainer.memory_trainer import MemoryTrainer, TrainsMemory

_MODULE_OF = {
    "CorpusOptions": "options",
    "MemoryTrainer": "trainer.memory_trainer",
    "Rates": "optim.rates",
    "RunOptions": "run_options",
    "TrainConfig": "options",
    "TrainResult": "run.training_run",
    "TrainableReport": "optim.freezing",
    "TrainsMemory": "trainer.memory_trainer",
    "WeightedCorpus": "options",
    "group_schedules": "optim.parameter_groups",
    "lora_config": "optim.lora",
    "parameter_groups": "optim.parameter_groups",
    "set_trainable": "optim.freezing",
    "train": "run.train",
}

__all__ = [
    "CorpusOptions",
    "MemoryTrainer",
    "Rates",
    "RunOptions",
    "TrainConfig",
    "TrainResult",
    "TrainableReport",
    "TrainsMemory",
    "WeightedCorpus",
    "group_schedules",
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

"""Continual pretraining: which layers train, at which rates, on which text, and the run that does it."""

from midus_hf.training.freezing import TrainableReport, set_trainable
from midus_hf.training.options import CorpusOptions, TrainConfig, WeightedCorpus
from midus_hf.training.parameter_groups import parameter_groups
from midus_hf.training.run import TrainResult, train
from midus_hf.training.trainer import MemoryTrainer

__all__ = [
    "CorpusOptions",
    "MemoryTrainer",
    "TrainConfig",
    "TrainResult",
    "TrainableReport",
    "WeightedCorpus",
    "parameter_groups",
    "set_trainable",
    "train",
]

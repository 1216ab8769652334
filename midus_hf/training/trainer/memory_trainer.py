"""Transformers' Trainer with the parameter groups and rates, the loss and the log of a memory model."""

from typing import Any

from transformers import Trainer

from midus_hf.training.optim.rates import Rates
from midus_hf.training.trainer.memory_aids import AidsMemory


class MemoryTrainer(AidsMemory, Trainer):
    """A `Trainer` whose memory keys keep a constant rate, and its values that or a course of their own.

    All else is the Trainer's own.

    Args:
        rates: As in `TrainsMemory`. Default: none, and the `TrainingArguments` say them.
        balance_loss: Coefficient of the balance loss of the memories, which is added to the loss in training alone.
            Default: 0.
        usage_every: Steps between log events that tell how memory slots are used. Default: none.
        kwargs: What a `Trainer` takes.

    Raises:
        ValueError: If `balance_loss` is set where parameters are sharded: the loss reads keys outside the forward
            pass. If `usage_every` is set and `args.torch_compile`: what is counted runs uncompiled.
    """

    def __init__(
        self,
        *args: Any,
        rates: Rates | None = None,
        balance_loss: float = 0.0,
        usage_every: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, rates=rates, balance_loss=balance_loss, usage_every=usage_every, **kwargs)

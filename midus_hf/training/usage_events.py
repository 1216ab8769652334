"""Log events that tell how a run uses the slots of its memories."""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from midus_hf.analysis.usage import Usage, summarise


class UsageEvents(TrainerCallback):
    """Ask for a log event every so many steps, and say what it shall tell of the usage since the one before.

    Events also fall on the steps that save a checkpoint, so that those of a resumed run are those of the uninterrupted
    one.

    Args:
        every: Optimizer steps between events.
    """

    def __init__(self, every: int):
        self.every = every
        self.usage: Usage | None = None
        """What is counted; None while nothing is."""
        self._due = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.usage is not None and (state.global_step % self.every == 0 or control.should_save):
            self._due = control.should_log = True

    def measures(self, add_up: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """`memory_used_share` and `memory_perplexity`, means over memories of what `MemoryUsage` has; `{}` if not due.

        Args:
            add_up: Gives the sum of a tensor over all processes.
        """
        if self.usage is None or not self._due:
            return {}
        self._due = False
        memories = summarise({place: add_up(counts) for place, counts in self.usage.counts.items()}).values()
        self.usage.reset()
        return {
            "memory_used_share": statistics.fmean(memory.used for memory in memories),
            "memory_perplexity": statistics.fmean(memory.perplexity for memory in memories),
        }

"""TRL's trainer in a run: the model's own loss, our rates and log, and checkpoints that may fail to be written."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, Trainer
from trl import SFTTrainer

from midus_hf.training.run.run_trainer import InRun


class _ModelLossTrainer(SFTTrainer):
    """TRL's trainer with the loss that the model itself computes, which may hold more than TRL knows of."""

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor | Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        return Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Leave the card alone: a run adds to that of its model."""


class SftTrainer(InRun, _ModelLossTrainer):
    """The Trainer of a run of supervised fine-tuning, on sequences that are tokens already.

    Args:
        tokenizer: Saved beside every checkpoint.
        kwargs: What `InRun` and TRL's trainer take.
    """

    def __init__(self, *args: Any, tokenizer: PreTrainedTokenizerBase, **kwargs: Any):
        super().__init__(*args, tokenizer=tokenizer, processing_class=tokenizer, **kwargs)
        # TRL's trainer cannot do without; but a Trainer that has it rewrites special tokens in the model's config.
        self.processing_class = None

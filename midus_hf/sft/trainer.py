"""TRL's trainer in a run: the model's own loss, the run's rates and log, and checkpoints whose writing may fail."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, Trainer
from trl import SFTTrainer

from midus_hf.training.run.run_trainer import InRun


class _ModelLossTrainer(SFTTrainer):
    """TRL's trainer with the loss that the model computes, which may have terms that TRL does not know."""

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor | Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        return Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write no card, since the run extends the card of its model."""


class SftTrainer(InRun, _ModelLossTrainer):
    """The Trainer of a run of supervised fine-tuning, on sequences that are already tokens.

    Args:
        tokenizer: Tokenizer that is saved beside every checkpoint.
        kwargs: Arguments of `InRun` and of TRL's trainer.
    """

    def __init__(self, *args: Any, tokenizer: PreTrainedTokenizerBase, **kwargs: Any):
        super().__init__(*args, tokenizer=tokenizer, processing_class=tokenizer, **kwargs)
        # TRL's constructor needs the tokenizer, but a Trainer that keeps it rewrites the special tokens in the model's config.
        self.processing_class = None

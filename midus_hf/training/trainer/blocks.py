"""Blocks that texts fetch from a bank: they are no parameters of the model, and are updated when fetched."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from midus_hf.banks.block_reader import GENERIC
from midus_hf.banks.trained_bank import TrainedBank
from midus_hf.files.checkpoint_files import BLOCK_STATES
from midus_hf.models.fetching import IDS
from midus_hf.training.data.sequence_audit import SEQUENCE, SequenceAudit
from midus_hf.training.optim.parameter_groups import BLOCKS_GROUP, banks_that_train


class Blocks:
    """What a Trainer of any kind does for blocks that passes fetch: they get gradients, and AdamW moments of their own.

    Where several processes train, each has the mean of the gradients of all before a step, so that blocks which some of them fetched
    stay equal in all.

    Args:
        trainer: That has its model and its accelerator.
        audit: Records which documents train blocks; examples are then `NumberedSequences`. Default: none.
        generic_share: Share of sequences that fetch the blocks of the generic memory in place of those of their path (section 4 of
            hierarchical memories). Which these are follows from the seed and from the place of a sequence among all that the run
            trains on: others in each epoch, and the same where a run is resumed. Default: 0.

    Raises:
        ValueError: If blocks train and parameters are sharded, or gradients are scaled for float16. If what trains blocks shall be
            recorded, and none train.
    """

    def __init__(self, trainer: Any, audit: SequenceAudit | None = None, generic_share: float = 0.0):
        self._trainer, self.generic_share = trainer, generic_share
        self._pass = (-1, 0)  # the step, and the number of the pass within it
        banks = banks_that_train(trainer.model)
        if banks and (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or trainer.args.fp16):
            raise ValueError(
                "blocks of a memory bank train, which FSDP, DeepSpeed and fp16 do not know of; expected processes that hold whole "
                "models, and bf16 or float32."
            )
        self.banks: list[TrainedBank] = [trained for bank in banks for trained in bank.train().values()]
        self._are_averaged = False
        self.audit = audit
        if audit is not None and not self.banks:
            raise ValueError(
                "audit is true, and no blocks of a memory bank train; expected a model whose texts fetch blocks, and trainable to be "
                "new or all. Leave it out."
            )
        if audit is not None and trainer.is_world_process_zero():
            audit.follow(self.banks)
        if self.banks and not any(parameter.requires_grad for parameter in trainer.model.parameters()):
            # There is nothing for DistributedDataParallel to average, which refuses such a model, and accelerate asks on GPUs alone.
            trainer.accelerator.prepare_model = partial(trainer.accelerator.prepare_model, evaluation_mode=True)

    def begin_pass(self, inputs: dict[str, Any]) -> None:
        """Say which blocks a training pass fetches; which sequences they are is no business of the model."""
        sequences = inputs.pop(SEQUENCE, None)
        if IDS in inputs:
            inputs[IDS] = self._with_generic(inputs[IDS])
        if self.audit is not None:
            assert sequences is not None, "examples of a run that is recorded say which they are"
            self.audit.see(sequences, inputs[IDS])

    def _with_generic(self, memory_ids: torch.Tensor) -> torch.Tensor:
        """Let a share of the rows `[B, p]` of a pass fetch the generic memory."""
        args, step = self._trainer.args, self._trainer.state.global_step
        self._pass = (step, self._pass[1] + 1 if self._pass[0] == step else 0)
        first_of_pass = (
            step * args.gradient_accumulation_steps + self._pass[1]
        ) * args.world_size + args.process_index
        is_generic = draw_generic(
            args.seed, first_of_pass * args.train_batch_size, len(memory_ids), self.generic_share
        )
        return memory_ids.masked_fill(is_generic[:, None].to(memory_ids.device), GENERIC)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Update blocks whenever the optimizer updates parameters, with the rate and the decay of its group of blocks."""
        if self.banks:
            optimizer.register_step_pre_hook(lambda *_: self.average_gradients())
            optimizer.register_step_post_hook(lambda optimizer, *_: self._step(optimizer))

    def leaves(self) -> list[torch.Tensor]:
        """What blocks have gathered gradients in; the gradients are the same in all processes afterwards."""
        self.average_gradients()
        return [leaf for bank in self.banks for leaf in bank.leaves()]

    def average_gradients(self) -> None:
        """Take the mean of gradients over processes, once for each step."""
        if self._trainer.args.world_size > 1 and not self._are_averaged:
            for bank in self.banks:
                bank.average_gradients()
        self._are_averaged = True

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        group = next(group for group in optimizer.param_groups if group.get("name") == BLOCKS_GROUP)
        for bank in self.banks:
            bank.step(group["lr"], group["betas"], group["eps"], group["weight_decay"])
        if self.audit is not None:
            self.audit.step()
        self._are_averaged = False

    def save_states(self, checkpoint: str) -> None:
        """Save the blocks and their moments beside the state of the optimizer."""
        if self._trainer.args.should_save:
            for number, bank in enumerate(self.banks):
                bank.save_state(Path(checkpoint, BLOCK_STATES, str(number)))

    def load(self, checkpoint: str) -> None:
        """Load the blocks of a checkpoint, which belong to the model as its weights do."""
        for number, bank in enumerate(self.banks):
            bank.load_state(Path(checkpoint, BLOCK_STATES, str(number)))


def draw_generic(seed: int, first: int, count: int, share: float) -> torch.Tensor:
    """Draw which of some sequences that follow one another in a run fetch the generic memory, `[count]`, bool.

    Args:
        seed: Of the run.
        first: The place of the first of them among all that the run trains on, from 0.
        count: How many they are.
        share: The probability of each.
    """
    drawn = [np.random.default_rng([seed, place]).random() < share for place in range(first, first + count)]
    return torch.tensor(drawn, dtype=torch.bool)

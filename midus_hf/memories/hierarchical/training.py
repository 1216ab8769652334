"""Training of blocks that texts fetch from a bank: blocks are not parameters of the model, and are updated when fetched."""

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from midus_hf.config.errors import RequestError
from midus_hf.files.checkpoint_files import BLOCK_STATES, TREE_FILES
from midus_hf.files.json_text import read_json
from midus_hf.memories.hierarchical.bank.block_reader import GENERIC
from midus_hf.memories.hierarchical.bank.model_banks import Banks
from midus_hf.memories.hierarchical.bank.trained_bank import TrainedBank
from midus_hf.memories.hierarchical.fetching import IDS

# Name of the optimizer's group for blocks: it has no parameters, only the rate and the decay of blocks.
BLOCKS_GROUP = "blocks"


class Blocks:
    """Training of fetched blocks, for any kind of Trainer: blocks get gradients and separate AdamW moments.

    If several processes train, each averages the gradients over all processes before a step, so that blocks that only
    some processes fetched stay equal in all. A share of the sequences, `generic_share`, fetches the blocks of the generic memory
    instead of those of its path (hierarchical memories, section 4), by the seed and the index of a sequence among all of the run:
    the choice differs between epochs, and is the same when a run is resumed.
    """

    def __init__(self, trainer: Any, generic_share: float = 0.0):
        self._trainer, self.generic_share = trainer, generic_share
        self._pass = (-1, 0)  # the step, and the number of the pass within it
        banks = [bank for bank in model_banks(trainer.model) if bank.trainable]
        if banks and (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or trainer.args.fp16):
            raise RequestError(
                "blocks of a memory bank train, which FSDP, DeepSpeed and fp16 do not support; expected processes that hold whole "
                "models, and bf16 or float32."
            )
        if banks:
            optimizer, _ = trainer.optimizer_cls_and_kwargs or trainer.get_optimizer_cls_and_kwargs(trainer.args)
            given = None if {"betas", "eps"} <= inspect.signature(optimizer).parameters.keys() else optimizer.__name__
            if given or trainer.optimizer is not None:
                raise RequestError(
                    "blocks of a memory bank train, by AdamW with the betas and eps of the run's optimizer, which "
                    f"{given or 'a Trainer with another optimizer'} does not have; expected an optimizer such as optim: "
                    "adamw_torch. Or freeze the blocks: trainable: [3, 7] trains only layers."
                )
        self.banks: list[TrainedBank] = [trained for bank in banks for trained in train_blocks(bank).values()]
        self._are_averaged = False
        if self.banks and not any(parameter.requires_grad for parameter in trainer.model.parameters()):
            # DistributedDataParallel refuses a model without trained parameters, and accelerate avoids wrapping it only on GPUs.
            trainer.accelerator.prepare_model = partial(trainer.accelerator.prepare_model, evaluation_mode=True)

    def begin_pass(self, inputs: dict[str, Any] | list[Any]) -> None:
        """Decide which sequences of a training pass fetch the blocks of the generic memory."""
        if isinstance(inputs, list):
            if self.banks:
                raise RequestError(
                    "blocks of a memory bank train, and this trainer generates its texts, for which it fetches none; expected a "
                    "trainer whose batches have memory_ids. Or freeze the blocks: set_trainable(model, [3, 7]) trains only layers."
                )
        elif IDS in inputs:
            args, step, paths = self._trainer.args, self._trainer.state.global_step, inputs[IDS]
            self._pass = (step, self._pass[1] + 1 if self._pass[0] == step else 0)
            passes = step * args.gradient_accumulation_steps + self._pass[1]
            first = (passes * args.world_size + args.process_index) * args.train_batch_size
            is_generic = draw_generic(args.seed, first, len(paths), self.generic_share)
            inputs[IDS] = paths.masked_fill(is_generic[:, None].to(paths.device), GENERIC)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Update blocks at every step of the optimizer, with the rate and the decay of the optimizer's group of blocks."""
        if self.banks:
            optimizer.register_step_pre_hook(lambda *_: self.average_gradients())
            optimizer.register_step_post_hook(lambda optimizer, *_: self._step(optimizer))

    def leaves(self) -> list[torch.Tensor]:
        """Return the tensors that hold the gradients of blocks, after averaging the gradients over processes."""
        self.average_gradients()
        return [leaf for bank in self.banks for leaf in bank.leaves()]

    def average_gradients(self) -> None:
        """Average the gradients of blocks over processes, once per step."""
        if self._trainer.args.world_size > 1 and not self._are_averaged:
            for bank in self.banks:
                bank.average_gradients()
        self._are_averaged = True

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        group = next(group for group in optimizer.param_groups if group.get("name") == BLOCKS_GROUP)
        for bank in self.banks:
            bank.step(group["lr"], group["betas"], group["eps"], group["weight_decay"])
        self._are_averaged = False

    def save(self, checkpoint: Path) -> None:
        for number, bank in enumerate(self.banks):
            bank.save_state(checkpoint / BLOCK_STATES / str(number))

    def load(self, checkpoint: Path) -> None:
        for number, bank in enumerate(self.banks):
            bank.load_state(checkpoint / BLOCK_STATES / str(number))


def train_blocks(banks: Banks) -> dict[str, TrainedBank]:
    """Make blocks trainable, and return the banks; one that was trained before continues from its state."""
    tree, folder = banks.tree
    for name in banks.layouts:
        bank = banks.bank(name)
        if not isinstance(bank, TrainedBank):
            bank.grow(tree=tree, **growth_of(folder))
            bank = banks.opened[name] = TrainedBank(bank)
        bank.tree = bank.bank.tree
        # For paths of an earlier tree, from which the bank's tree was grown, the bank keeps its tree.
        bank.tree_folder = folder if bank.tree == tree else None
    return banks.opened


def growth_of(folder: Path | None) -> dict[str, Any]:
    """Return `roots`, the nodes of the first level, and `grown_from`, the earlier fingerprints, of the tree in a folder, if any."""
    path = None if folder is None else folder / TREE_FILES[1]
    record = {} if path is None or not path.is_file() else read_json(path)
    return {"roots": record.get("roots"), "grown_from": tuple(record.get("grown_from", ()))}


def draw_generic(seed: int, first: int, count: int, share: float) -> torch.Tensor:
    """Draw which of consecutive sequences of a run, from index `first`, fetch the generic memory, `[count]`, bool."""
    drawn = [np.random.default_rng([seed, number]).random() < share for number in range(first, first + count)]
    return torch.tensor(drawn, dtype=torch.bool)


def model_banks(model: torch.nn.Module) -> list[Banks]:
    """Return the banks of a model, wrapped by PEFT or not, whose blocks train where they are `trainable`."""
    return [banks for module in model.modules() if (banks := getattr(module, "own_banks", None))]

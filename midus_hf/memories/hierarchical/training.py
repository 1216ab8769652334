"""Training of blocks that texts fetch from a bank: not parameters of the model, updated when fetched."""

import hashlib
import inspect
import math
import os
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import safetensors
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from midus_hf.config.errors import RequestError
from midus_hf.files.checkpoint_files import BLOCK_STATES, TREE_FILES, read_json
from midus_hf.memories.hierarchical.bank import BlockKey, BlockReader, MemoryBank
from midus_hf.memories.hierarchical.fetching import IDS, Banks
from midus_hf.memories.hierarchical.options import GENERIC, level_file

# Name of the optimizer's group for blocks: it has no parameters, only the rate and the decay of blocks.
BLOCKS_GROUP = "blocks"
# Rows of a block's state: its float32 values, and AdamW's means of gradients and of squared gradients.
_MASTER, _MEAN, _SQUARE = range(3)


@torch.no_grad()
def adamw_update(
    values: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    gradient: torch.Tensor,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Take a step of AdamW in place, for values with their moments; `step` counts from 1."""
    mean.lerp_(gradient, 1 - betas[0])
    square.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    root = square.div(1 - betas[1] ** step).sqrt_().add_(eps)
    values.mul_(1 - lr * weight_decay).addcdiv_(mean, root, value=-lr / (1 - betas[0] ** step))


class TrainedBank(BlockReader):
    """The blocks of a bank in training. Blocks that training never fetched are read from the bank."""

    trains = True

    def __init__(self, bank: MemoryBank):
        super().__init__(bank.layout)
        self.bank = bank
        # By fingerprint, None if unknown; the folder of its files, saved with the bank, is None for the bank's own.
        self.tree, self.tree_folder = bank.tree, None  # type: str | None, Path | None
        self._states: dict[int, torch.Tensor] = {}
        self._files: dict[int, BinaryIO] = {}
        self._has_room: set[BlockKey] = set()
        self._steps: dict[BlockKey, int] = {}
        self._leaves: dict[BlockKey, torch.Tensor] = {}

    @property
    def folder(self) -> Path:
        """Folder of the bank that is trained."""
        return self.bank.folder

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which the blocks are stored."""
        return self.bank.dtype

    def block(self, level: int, index: int) -> torch.Tensor:
        """Return a block's record; with gradients enabled, its float32 values, which accumulate gradients."""
        key = (level, index)
        if torch.is_grad_enabled():
            return self._leaf(key)
        return self._values(key) if key in self._steps or key in self._leaves else self.bank.block(level, index)

    def leaves(self) -> list[torch.Tensor]:
        """Return the values of blocks that have a gradient, in the order of level and node."""
        return [self._leaves[key] for key in sorted(self._leaves) if self._leaves[key].grad is not None]

    def average_gradients(self) -> None:
        """Average gradients of every fetched block over all processes, which must all call this."""
        with_gradients = sorted(key for key, leaf in self._leaves.items() if leaf.grad is not None)
        all_keys: list[list[BlockKey]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(all_keys, with_gradients)
        for key in sorted({key for keys in all_keys for key in keys}):
            leaf = self._leaf(key)
            if leaf.grad is None:
                leaf.grad = torch.zeros_like(leaf)
            dist.all_reduce(leaf.grad)
            leaf.grad /= dist.get_world_size()

    def step(self, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        """Update each block with a gradient as `torch.optim.AdamW` would if it saw only steps that fetched it."""
        for key, leaf in self._leaves.items():
            if leaf.grad is None:
                continue
            self._steps[key] = self._steps.get(key, 0) + 1
            master, mean, square = self._state(key)
            adamw_update(master, mean, square, leaf.grad, self._steps[key], lr, betas, eps, weight_decay)
        self._leaves.clear()
        self.changed()

    def named_values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name of each updated block, "block 5 of level 2", and its values, `[numel]`."""
        for level, index in self.touched():
            yield f"block {'generic' if index < 0 else index} of level {level}", self._values((level, index))

    def touched(self) -> list[BlockKey]:
        """Return the level and node of every block that was updated, ascending."""
        return sorted(self._steps)

    def digest(self) -> str:
        """Return the SHA-256 of all blocks in their trained state."""
        digest = hashlib.sha256(self.bank.digest().encode())
        for name, values in self.named_values():
            digest.update(name.encode() + values.numpy().tobytes())
        return digest.hexdigest()

    def save(self, folder: str | os.PathLike) -> None:
        """Write the bank with its trained blocks into a folder, in the dtype of the bank."""
        trained = {key: partial(self._values, key) for key in self.touched()}
        self.bank.save(folder, trained, self.tree, self.tree_folder)

    def save_state(self, folder: Path) -> None:
        """Write values, moments and numbers of steps of updated blocks, for `load_state`: a file per level."""
        folder.mkdir(parents=True, exist_ok=True)
        for level in self.layout.levels:
            keys = [key for key in self.touched() if key[0] == level]
            empty = torch.empty(0, 3, self.layout.record_numel(level))
            tensors = {
                "states": torch.stack([self._state(key) for key in keys]) if keys else empty,
                "nodes": torch.tensor([index for _, index in keys], dtype=torch.int64),
                "steps": torch.tensor([self._steps[key] for key in keys], dtype=torch.int64),
            }
            save_file(tensors, folder / level_file(level))

    def load_state(self, folder: Path) -> None:
        """Resume from the files that `save_state` wrote, or raise a `RequestError` about them."""
        self._has_room.clear()
        for held in (self._states, self._files, self._steps, self._leaves):
            held.clear()
        self.changed()
        try:
            for level in self.layout.levels:
                state = load_file(folder / level_file(level))
                for position, (index, step) in enumerate(
                    zip(state["nodes"].tolist(), state["steps"].tolist(), strict=True)
                ):
                    self._state((level, index)).copy_(state["states"][position])
                    self._steps[level, index] = step
        except (OSError, LookupError, ValueError, RuntimeError, safetensors.SafetensorError) as error:
            raise RequestError(
                f"the state of blocks in {folder} cannot be read ({error}); expected that of a run that trains blocks. Resume from "
                "another checkpoint."
            ) from None

    def _leaf(self, key: BlockKey) -> torch.Tensor:
        if key not in self._leaves:
            with torch.inference_mode(False), torch.no_grad():
                if key not in self._steps:
                    state = self._state(key)
                    state.zero_()
                    state[_MASTER] = self.bank.block(*key)
                self._leaves[key] = self._values(key).detach().requires_grad_()
        return self._leaves[key]

    def _values(self, key: BlockKey) -> torch.Tensor:
        return self._state(key)[_MASTER]

    def _state(self, key: BlockKey) -> torch.Tensor:
        """Return a block's master copy and both moments, `[3, numel]`, in a file with room for them."""
        level, index = key
        size = 3 * 4 * self.layout.record_numel(level)
        if level not in self._states:
            shape = (self.layout.num_records(level), 3, self.layout.record_numel(level))
            with tempfile.TemporaryDirectory(prefix="midus-blocks-") as folder:
                path = Path(folder, level_file(level))
                path.touch()
                os.truncate(path, size * shape[0])
                with torch.inference_mode(False):
                    mapped = torch.from_file(str(path), shared=True, size=math.prod(shape))
                self._states[level], self._files[level] = mapped.view(shape), path.open("r+b")
        # A full disk would kill the process where the file is mapped.
        if key not in self._has_room and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._files[level].fileno(), size * (index + 1), size)
            self._has_room.add(key)
        return self._states[level][index + 1]


class BlockTrainer:
    """Training of fetched blocks, for any Trainer: blocks get gradients and separate AdamW moments.

    Processes average gradients before a step, so that blocks that only some of them fetched stay equal in all. A share of
    sequences, `generic_share`, fetches the generic memory (section 4), drawn by the seed and a sequence's index in the run: the
    choice differs between epochs, and is the same when a run is resumed.
    """

    def __init__(self, trainer: Any, generic_share: float = 0.0):
        self._trainer, self.generic_share = trainer, generic_share
        self._pass = (-1, 0)  # the step, and the number of the pass within it
        self._are_averaged = False
        banks: Banks = trainer.model.banks
        if banks.trainable and (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or trainer.args.fp16):
            raise RequestError(
                "blocks of a memory bank train, which FSDP, DeepSpeed and fp16 do not support; expected processes that hold whole "
                "models, and bf16 or float32."
            )
        if banks.trainable:
            optimizer, _ = trainer.optimizer_cls_and_kwargs or trainer.get_optimizer_cls_and_kwargs(trainer.args)
            given = None if {"betas", "eps"} <= inspect.signature(optimizer).parameters.keys() else optimizer.__name__
            if given or trainer.optimizer is not None:
                raise RequestError(
                    "blocks of a memory bank train, by AdamW with the betas and eps of the run's optimizer, which "
                    f"{given or 'a Trainer with another optimizer'} does not have; expected an optimizer such as optim: "
                    "adamw_torch. Or freeze the blocks: trainable: [3, 7] trains only layers."
                )
        self.banks: list[TrainedBank] = [*train_blocks(banks).values()] if banks.trainable else []
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
        """Update blocks at every step of the optimizer, with the rate and decay of its group of blocks."""
        if self.banks:
            optimizer.register_step_pre_hook(lambda *_: self.average_gradients())
            optimizer.register_step_post_hook(self._step)

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

    def _step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
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
    """Return `roots`, nodes of the first level, and `grown_from`, fingerprints, of the tree in a folder."""
    path = None if folder is None else folder / TREE_FILES[1]
    record = {} if path is None or not path.is_file() else read_json(path)
    return {"roots": record.get("roots"), "grown_from": tuple(record.get("grown_from", ()))}


def draw_generic(seed: int, first: int, count: int, share: float) -> torch.Tensor:
    """Draw which sequences of a run, from index `first`, fetch the generic memory, `[count]`, bool."""
    drawn = [np.random.default_rng([seed, number]).random() < share for number in range(first, first + count)]
    return torch.tensor(drawn, dtype=torch.bool)

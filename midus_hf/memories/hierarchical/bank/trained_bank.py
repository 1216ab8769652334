"""A bank whose blocks train: each block has its own optimizer state, and is updated only after a pass has fetched it."""

import hashlib
import math
import os
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import safetensors
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from midus_hf.config.errors import RequestError
from midus_hf.memories.hierarchical.bank.block_reader import BlockReader
from midus_hf.memories.hierarchical.bank.memory_bank import BlockKey, MemoryBank
from midus_hf.memories.hierarchical.blocks import level_file

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
    """Take a step of AdamW in place, for values with their moments; the step counts from 1, for the bias correction."""
    mean.lerp_(gradient, 1 - betas[0])
    square.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    root = square.div(1 - betas[1] ** step).sqrt_().add_(eps)
    values.mul_(1 - lr * weight_decay).addcdiv_(mean, root, value=-lr / (1 - betas[0] ** step))


class TrainedBank(BlockReader):
    """The blocks of a bank in training. Blocks that training never fetched are read from the bank."""

    trains = True

    # Fingerprint of the tree whose paths train the blocks, initially the bank's; None if unknown.
    tree: str | None

    # Folder with the files of this tree, which are saved with the bank. None for the bank's own folder, which may have
    # none.
    tree_folder: Path | None = None

    def __init__(self, bank: MemoryBank):
        super().__init__(bank.layout)
        self.bank, self.tree = bank, bank.tree
        # The mapped states of each level, `[rows, 3, numel]`.
        self._states: dict[int, torch.Tensor] = {}
        self._files: dict[int, BinaryIO] = {}
        self._has_room: set[BlockKey] = set()
        # Number of updates of each updated block.
        self._steps: dict[BlockKey, int] = {}
        # Leaf tensors that accumulate gradients, for the blocks that were fetched since the last step.
        self._leaves: dict[BlockKey, torch.Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "TrainedBank":
        """Return this bank itself: copies of a model share one bank."""
        return self

    @property
    def folder(self) -> Path:
        """Folder of the bank that is trained."""
        return self.bank.folder

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which the blocks are stored."""
        return self.bank.dtype

    def block(self, level: int, index: int) -> torch.Tensor:
        """Return the record of a block; with gradients enabled, the block's float32 values, which accumulate gradients."""
        key = (level, index)
        if torch.is_grad_enabled():
            return self._leaf(key)
        return self._values(key) if key in self._steps or key in self._leaves else self.bank.block(level, index)

    def leaves(self) -> list[torch.Tensor]:
        """Return the values of blocks that have a gradient, in the order of level and node."""
        return [self._leaves[key] for key in sorted(self._leaves) if self._leaves[key].grad is not None]

    def average_gradients(self) -> None:
        """Average gradients over all processes, for every block that any process fetched. All processes must call this."""
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
        """Update each block that has a gradient, as `torch.optim.AdamW` would if it saw only the steps that fetched the block."""
        for key, leaf in self._leaves.items():
            if leaf.grad is None:
                continue
            self._steps[key] = self._steps.get(key, 0) + 1
            master, mean, square = self._state(key)
            adamw_update(master, mean, square, leaf.grad, self._steps[key], lr, betas, eps, weight_decay)
        self._leaves.clear()
        self.changed()

    def named_values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name of each updated block for messages, such as "block 5 of level 2", and its values, `[numel]`."""
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
        """Write the values, moments and numbers of steps of every updated block, for `load_state`: a file per level."""
        folder.mkdir(parents=True, exist_ok=True)
        for level in self.layout.levels:
            keys = [key for key in self.touched() if key[0] == level]
            none = torch.empty(0, 3, self.layout.record_numel(level))
            tensors = {
                "states": torch.stack([self._state(key) for key in keys]) if keys else none,
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
        """Return the leaf of a block, which shares the memory of its mapped values."""
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
        """Return the mapped state of a block, `[3, numel]`."""
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
        if key not in self._has_room and hasattr(
            os, "posix_fallocate"
        ):  # a full disk would kill the process where it is mapped
            os.posix_fallocate(self._files[level].fileno(), size * (index + 1), size)
            self._has_room.add(key)
        return self._states[level][index + 1]

"""A bank whose blocks train: each block has its own optimizer state, and is updated only after a pass has fetched it."""

import collections
import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from midus_hf.banks.audit import BankAudit
from midus_hf.banks.bank_description import described_again, write_description
from midus_hf.banks.block_reader import BlockReader
from midus_hf.banks.level_file import BankError, LevelFile, create_level_file
from midus_hf.banks.memory_bank import MemoryBank
from midus_hf.banks.tiers import BlockKey, TierStatistics
from midus_hf.config.fetched_blocks import BANK_AUDIT, level_file
from midus_hf.files.whole_files import link_or_copy, sync, whole_file

_TOUCHED = "touched.json"
_BYTES_IN_MEMORY = 8 * 2**30


@dataclass
class BlockState:
    """A block that trains, with its optimizer state.

    Args:
        master: The block's values, `[numel]`, float32; a leaf that accumulates gradients.
        mean: AdamW's mean of gradients, `[numel]`.
        square: AdamW's mean of squared gradients, `[numel]`.
        step: Number of updates that the block has had. Default: 0.
    """

    master: torch.Tensor
    mean: torch.Tensor
    square: torch.Tensor
    step: int = 0

    @property
    def nbytes(self) -> int:
        """Size of `master`, `mean` and `square` in bytes."""
        return 3 * self.master.nbytes

    def packed(self) -> torch.Tensor:
        """Return the state as one record, `[3 * numel + 1]`, float32."""
        step = torch.tensor([float(self.step)])
        return torch.cat([self.master.detach(), self.mean, self.square, step])

    @classmethod
    def unpacked(cls, record: torch.Tensor) -> "BlockState":
        """Return the state that `packed` turned into a record."""
        numel = (len(record) - 1) // 3
        master, mean, square, step = record.split([numel, numel, numel, 1])
        return cls(master.clone().requires_grad_(), mean.clone(), square.clone(), int(step))


@dataclass(frozen=True)
class StatePart:
    """A file with the states of some blocks of a level: `indices` has the block of each record.

    A later file may have a newer record of the same block.
    """

    path: Path
    indices: list[int]


class TrainedBank(BlockReader):
    """The blocks of a bank as training has left them. Blocks that training never fetched are read from the bank.

    A block that a pass with gradients has fetched gets a float32 master and two moments. Recently fetched blocks stay
    in memory, and the others wait in temporary files (in `TMPDIR`). Memory use therefore follows the blocks that a step
    fetches, not the size of the bank.

    Args:
        bank: The bank that is trained. Its files are not changed, except by a `save` into its own folder.
        bytes_in_memory: Bytes of masters and moments to keep in memory. Default: 8 GB.
    """

    trains = True
    # The record of what trains the blocks, saved and loaded with the blocks; None if the run records nothing.
    audit: BankAudit | None = None

    # Fingerprint of the tree whose paths train the blocks, initially the bank's; None if unknown.
    tree: str | None

    # Folder with the files of this tree, which are saved with the bank. None for the bank's own folder, which may have
    # none.
    tree_folder: Path | None = None

    def __init__(self, bank: MemoryBank, bytes_in_memory: int = _BYTES_IN_MEMORY):
        super().__init__(bank.layout)
        self.bank, self.tree = bank, bank.tree
        # States in memory, from the one that was fetched longest ago.
        self._states: collections.OrderedDict[BlockKey, BlockState] = collections.OrderedDict()
        self._bytes_in_memory = bytes_in_memory
        # Temporary files, by level, with the states that memory has no room for.
        self._waiting: dict[int, LevelFile] = {}
        # Files, and positions in them, of the states that training resumed from.
        self._resumed: dict[BlockKey, tuple[LevelFile, int]] = {}
        # Blocks that were updated since the last state was saved or loaded, and the files of this state.
        self._changed: set[BlockKey] = set()
        self._parts: dict[int, list[StatePart]] = {}

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
        """Return the record of a block; with gradients enabled, the block's float32 master, which accumulates gradients."""
        if torch.is_grad_enabled():
            return self._state(level, index).master
        if self._is_touched(level, index):
            return self._read_state(level, index).master.detach()  # not kept in memory: an evaluation may fetch many
        return self.bank.block(level, index)

    def statistics(self) -> dict[str, TierStatistics]:
        """Return the statistics of reads from the bank. Blocks that were trained are in no tier."""
        return self.bank.statistics()

    def read_ahead(self, keys: Sequence[BlockKey]) -> None:
        """Start reading the blocks that were never trained, ahead of their fetch, and return at once."""
        self.bank.read_ahead([key for key in keys if not self._is_touched(*key)])

    def leaves(self) -> list[torch.Tensor]:
        """Return the masters that have a gradient, in the order of level and index."""
        return [self._states[key].master for key in sorted(self._states) if self._states[key].master.grad is not None]

    def average_gradients(self) -> None:
        """Average gradients over all processes, for every block that any process fetched. All processes must call this."""
        own = sorted(key for key, state in self._states.items() if state.master.grad is not None)
        of_all: list[list[BlockKey]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(of_all, own)
        for level, index in sorted({key for keys in of_all for key in keys}):
            master = self._state(level, index).master
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            dist.all_reduce(master.grad)
            master.grad /= dist.get_world_size()

    @torch.no_grad()
    def step(self, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        """Update each block that has a gradient, as `torch.optim.AdamW` would if it saw only the steps that fetched the block."""
        for key, state in self._states.items():
            gradient = state.master.grad
            if gradient is None:
                continue
            self._changed.add(key)
            state.step += 1
            state.mean.lerp_(gradient, 1 - betas[0])
            state.square.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
            root = state.square.div(1 - betas[1] ** state.step).sqrt_().add_(eps)
            state.master.mul_(1 - lr * weight_decay)
            state.master.addcdiv_(state.mean, root, value=-lr / (1 - betas[0] ** state.step))
            state.master.grad = None
        self.changed()
        self._put_aside()

    def forget_gradients(self) -> None:
        """Drop the gradients of all masters."""
        for state in self._states.values():
            state.master.grad = None

    def first_not_finite(self) -> str | None:
        """Return "block INDEX of level LEVEL holds nan" (or inf) for the first block with a number that is not finite, or None.

        Blocks that no pass has fetched since training began or resumed have not changed, and are not checked.
        """
        return _first_not_finite((key, self._read_state(*key)) for key in sorted(self._updated()))

    def first_not_finite_in(self, folder: Path) -> str | None:
        """Return the message of `first_not_finite` for the blocks that `save_state` wrote to a folder, or None."""
        for level, parts in _parts_in(folder).items():
            for part in parts:
                with contextlib.closing(self._state_file(level, part)) as file:
                    records = ((index, file.read(position)) for position, index in enumerate(part.indices))
                    message = _first_not_finite(
                        ((level, index), BlockState.unpacked(record))
                        for index, record in records
                        if record is not None
                    )
                if message is not None:
                    return message
        return None

    def touched(self) -> list[BlockKey]:
        """Return the level and index of every block that was updated, ascending."""
        return sorted({*self._updated(), *self._resumed})

    def _updated(self) -> set[BlockKey]:
        """Return the blocks that were updated since training began or resumed."""
        waiting = {(level, index) for level, file in self._waiting.items() for index in file.written()}
        return waiting | {key for key, state in self._states.items() if state.step}

    def save(self, folder: str | os.PathLike, link_from: Path | None = None) -> None:
        """Write the bank with its trained blocks into a folder, in the dtype of the bank.

        The audit of training is written along. If blocks were trained without an audit, the bank's existing audit is
        left out, because it would be incomplete.

        Args:
            folder: Folder of the copy, which is created if missing. In the bank's own folder, the trained blocks are
                written into the bank.
            link_from: Folder of this bank or of a copy, whose equal files are hard-linked, as in `MemoryBank.save`.
        """
        trained = {key: partial(self._read_master, *key) for key in self.touched()}
        if not self.bank.lies_in(folder):
            save_audit = ((lambda path: None) if trained else None) if self.audit is None else self.audit.save
            self.bank.save(folder, trained, save_audit, self.tree, self.tree_folder, link_from=link_from)
            return
        with contextlib.closing(MemoryBank(folder, self.layout, writable=True)) as itself:
            # Removed before any block is written, so that a save that is killed leaves no audit that lacks what it wrote.
            if trained:
                (itself.folder / BANK_AUDIT).unlink(missing_ok=True)
                sync(itself.folder)
            for (level, index), master in trained.items():
                itself.write(level, index, master())
            itself.sync()
            itself.save_tree(itself.folder, self.tree_folder)
        write_description(self.bank.folder, described_again(self.bank.description, self.layout, self.tree))
        if self.audit is not None:
            self.audit.save(self.bank.folder / BANK_AUDIT)

    def save_state(self, folder: Path) -> None:
        """Write the masters, moments and steps of every updated block, for `load_state`.

        For a level that was saved before, only the blocks that have changed since are written, to an additional file.
        The files of the last saved or loaded state are linked into the folder, so each folder is complete. A level is
        written anew if its files would hold more than twice as many records as blocks were updated, or if one of its
        files is damaged.
        """
        folder.mkdir(parents=True, exist_ok=True)
        by_level: dict[int, list[int]] = {}
        for level, index in self.touched():
            by_level.setdefault(level, []).append(index)
        parts = {level: self._save_level(folder, level, indices) for level, indices in by_level.items()}
        if self.audit is not None:
            self.audit.save(folder / BANK_AUDIT)
        with whole_file(folder / _TOUCHED) as unfinished:
            named = {
                str(level): [[part.path.name, part.indices] for part in of_level] for level, of_level in parts.items()
            }
            unfinished.write_text(json.dumps(named))
        kept = {part.path.name for of_level in parts.values() for part in of_level}
        for path in folder.glob("level-*.safetensors"):
            if path.name not in kept:
                path.unlink()
        self._parts = parts
        self._changed.clear()

    def _save_level(self, folder: Path, level: int, touched: list[int]) -> list[StatePart]:
        """Write the states of a level's blocks, or only the changed ones; return the files that hold them."""
        before = self._parts.get(level, [])
        changed = [index for index in touched if (level, index) in self._changed]
        records = sum(len(part.indices) for part in before) + len(changed)
        if records > 2 * len(touched) or not all(self._is_sound(level, part) for part in before):
            before = []
        parts = [StatePart(folder / part.path.name, part.indices) for part in before]
        for source, part in zip(before, parts, strict=True):
            link_or_copy(source.path, part.path)
        if written := changed if before else touched:
            last = self._parts.get(level, [])[-1:]
            number = 1 + (int(last[0].path.stem.split("-")[2]) if last else 0)
            numel = 3 * self.layout.record_numel(level) + 1
            path = folder / f"level-{level}-{number}.safetensors"
            with whole_file(path) as unfinished:  # an open state may still read an older file of this name
                create_level_file(unfinished, len(written), numel, torch.float32)
                with contextlib.closing(LevelFile(unfinished, len(written), numel, writable=True)) as file:
                    for position, index in enumerate(written):
                        file.write(position, self._read_state(level, index).packed())
            parts.append(StatePart(path, written))
        return parts

    def load_state(self, folder: Path) -> None:
        """Resume from the files that `save_state` wrote, whose blocks are read when they are fetched. Damage is a `BankError`."""
        parts = _parts_in(folder)
        if self.audit is not None:
            self.audit.load(folder / BANK_AUDIT)
        self._states.clear()
        self._close_files()
        self.changed()
        self._changed.clear()
        self._parts = parts
        for level, of_level in parts.items():
            for part in of_level:  # later files hold newer records of the same blocks
                file = self._state_file(level, part)
                self._resumed |= {(level, index): (file, position) for position, index in enumerate(part.indices)}

    def _is_sound(self, level: int, part: StatePart) -> bool:
        """Return whether every record of a file matches its checksum, so that linking the file spreads no damage."""
        try:
            with contextlib.closing(self._state_file(level, part)) as file:
                return all(file.read(position) is not None for position in range(len(part.indices)))
        except (BankError, OSError):
            return False

    def _state_file(self, level: int, part: StatePart) -> LevelFile:
        return LevelFile(part.path, len(part.indices), 3 * self.layout.record_numel(level) + 1)

    def close(self) -> None:
        """Close the files of the bank and the temporary files, whose blocks are lost then."""
        self.bank.close()
        self._close_files()

    def _close_files(self) -> None:
        """Close the temporary files and the files of the state that training resumed from."""
        for file in (*self._waiting.values(), *(file for file, _ in self._resumed.values())):
            file.close()
        self._waiting.clear()
        self._resumed.clear()

    def _is_touched(self, level: int, index: int) -> bool:
        key = (level, index)
        if key in self._states or key in self._resumed:
            return True
        return level in self._waiting and self._waiting[level].is_written(index)

    def _state(self, level: int, index: int) -> BlockState:
        """Return the state of a block, which stays in memory until `step`."""
        key = (level, index)
        if key not in self._states:
            with torch.inference_mode(False):
                self._states[key] = self._read_state(level, index)
        self._states.move_to_end(key)
        return self._states[key]

    def _read_master(self, level: int, index: int) -> torch.Tensor:
        return self._read_state(level, index).master

    def _read_state(self, level: int, index: int) -> BlockState:
        """Return the current state of a block, wherever the state is kept."""
        key = (level, index)
        if key in self._states:
            return self._states[key]
        record = self._waiting[level].read(index) if level in self._waiting else None
        if record is None and key in self._resumed:
            file, position = self._resumed[key]
            record = file.read(position)
        if record is not None:
            return BlockState.unpacked(record)
        with torch.no_grad():
            master = self.bank.block(level, index).float().clone()
        return BlockState(master.requires_grad_(), torch.zeros_like(master), torch.zeros_like(master))

    def _put_aside(self) -> None:
        """Write the blocks that were fetched longest ago to temporary files, until the others fit in memory."""
        excess = sum(state.nbytes for state in self._states.values()) - self._bytes_in_memory
        while excess > 0:
            (level, index), state = self._states.popitem(last=False)
            if state.step:  # a block without an update can be read from the bank again
                self._waiting_file(level).write(index, state.packed())
            excess -= state.nbytes

    def _waiting_file(self, level: int) -> LevelFile:
        if level not in self._waiting:
            numel, records = 3 * self.layout.record_numel(level) + 1, self.layout.num_records(level)
            # The file loses its name as soon as it is open, so nothing stays on the disk, however the process ends.
            with tempfile.TemporaryDirectory(prefix="midus-blocks-") as folder:
                path = Path(folder, level_file(level))
                create_level_file(path, records, numel, torch.float32)
                self._waiting[level] = LevelFile(path, records, numel, writable=True)
        return self._waiting[level]


def _parts_in(folder: Path) -> dict[int, list[StatePart]]:
    """Return the files, by level, that `save_state` wrote to a folder."""
    try:
        touched = json.loads((folder / _TOUCHED).read_text())
        return {
            int(level): [StatePart(folder / name, list(indices)) for name, indices in parts]
            for level, parts in touched.items()
        }
    except OSError as error:
        raise BankError(
            f"there is no state of blocks in {folder} ({error.strerror}: {_TOUCHED}); expected that of a run that trains blocks."
        ) from None
    except (AttributeError, RecursionError, TypeError, ValueError):
        raise BankError(
            f"{folder / _TOUCHED} does not name the files that have the state of blocks; expected one that this version wrote. "
            "Resume from another checkpoint."
        ) from None


def _first_not_finite(states: Iterable[tuple[BlockKey, BlockState]]) -> str | None:
    for (level, index), state in states:
        largest = state.master.detach().abs().max().item()
        if not math.isfinite(largest):
            return f"block {index} of level {level} holds {largest}"
    return None

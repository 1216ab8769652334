"""The bytes that a run will write, and a check before training that its disk has room for them."""

import dataclasses
import math
import os
import shutil
from collections.abc import Sized
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedModel, TrainerState, TrainingArguments

from midus_hf.files.checkpoint_files import TRAINER_STATE
from midus_hf.training.optim.freezing import has_adapters
from midus_hf.training.output.run_checkpoints import checkpoints
from midus_hf.training.run_options import RunOptions

# Factor for the files beside the weights: tokenizer, code, log.
_MARGIN = 1.02

# Tensors that AdamW keeps for each parameter that trains, of the parameter's shape and dtype.
_MOMENTS = 2


@dataclasses.dataclass(frozen=True)
class RoomNeeded:
    """Bytes that a run adds to its disk.

    Args:
        model: Bytes of the trained model.
        checkpoint: Bytes of one checkpoint: the weights as they are held while training, and the optimizer's state of
            what trains.
        written: Most checkpoints that the run adds to the disk, counted while one is being written: the oldest is removed
            only afterwards.
        kept: Most checkpoints that the run adds to the disk, counted between two checkpoints and when the trained model
            is written.
    """

    model: int
    checkpoint: int
    written: int
    kept: int

    @property
    def peak(self) -> int:
        """Most bytes at any time: a checkpoint is being written, or the model is written beside kept checkpoints."""
        return max(self.written * self.checkpoint, self.kept * self.checkpoint + self.model)


def check_room_of_run(
    config: RunOptions,
    model: PreTrainedModel,
    dtypes: dict[str, torch.dtype],
    arguments: TrainingArguments,
    dataset: Dataset,
    checkpoint: Path | None,
) -> RoomNeeded:
    """Check that the disks of a run's folders have room for what the run will write; nothing is written yet.

    Args:
        model: The model as it trains, as in `room_needed`.
        dtypes: Dtypes in which the trained model is saved, as in `room_needed`.
        arguments: Arguments of the run's Trainer.
        dataset: Sequences that the run trains on.
        checkpoint: Checkpoint to resume from; None for a new run.

    Returns:
        The bytes needed in `output_dir`.

    Raises:
        ValueError: If a disk lacks room.
    """
    steps = _steps(arguments, dataset)
    output = Path(config.output_dir)
    steps_before = (
        0 if checkpoint is None else TrainerState.load_from_json(str(checkpoint / TRAINER_STATE)).global_step
    )
    intervals = [config.save_steps, config.eval_steps if config.load_best_model_at_end else None]
    saves = sum(math.ceil(max(steps - steps_before, 0) / interval) for interval in intervals if interval is not None)
    existing = {} if config.overwrite_output_dir else checkpoints(output)
    room = room_needed(model, dtypes, config, saves, len(existing), arguments.deepspeed_plugin is not None)
    _check_room("output_dir", config.output_dir, room, size_of(output) if config.overwrite_output_dir else 0)
    if config.output_on_failure is not None:
        _check_room("output_on_failure", config.output_on_failure, dataclasses.replace(room, written=0, kept=0))
    return room


def room_needed(
    model: PreTrainedModel,
    dtypes: dict[str, torch.dtype],
    config: RunOptions,
    saves: int,
    existing: int = 0,
    by_deepspeed: bool = False,
) -> RoomNeeded:
    """Count the bytes that a run will write. With adapters, checkpoints hold only the adapters and what trains whole.

    Args:
        model: The model as it trains: with `requires_grad` set and every parameter in the dtype in which it is held.
        dtypes: Dtypes in which the trained model is saved, by name, from `hold_for_training`.
        saves: Number of checkpoints that the run will write.
        existing: Number of the run's checkpoints already on the disk. Default: 0.
        by_deepspeed: Whether checkpoints also hold DeepSpeed's files: the weights once more, and float32 copies and
            moments of what trains. Default: false.
    """
    final = held = 0
    wrapped: Any = model
    adapters = wrapped.base_model.prefix if has_adapters(model) else None
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:  # tied weights are saved once
            continue
        seen.add(id(tensor))
        is_beside = _is_beside_the_weights(name, adapters)
        if not is_beside:
            final += tensor.numel() * dtypes.get(name, tensor.dtype).itemsize
        if is_beside or adapters is None:
            weights, state = tensor.nbytes, _MOMENTS * tensor.nbytes
            if by_deepspeed:
                weights, state = 2 * tensor.nbytes, (1 + _MOMENTS) * tensor.numel() * torch.float32.itemsize
            held += weights + state * tensor.requires_grad
    kept = written = saves
    if config.save_total_limit is not None:
        free_places = max(config.save_total_limit + config.load_best_model_at_end - existing, 0)
        kept, written = min(saves, free_places), min(saves, free_places + 1)
    return RoomNeeded(model=int(final * _MARGIN), checkpoint=int(held * _MARGIN), written=written, kept=kept)


def _is_beside_the_weights(name: str, adapters: str | None) -> bool:
    """Return whether a tensor belongs to a PEFT adapter or to a copy that trains whole, and so is no weight.

    Args:
        name: Name of the tensor.
        adapters: Part of the name that marks tensors of adapters; None if the model has no adapters.
    """
    return adapters is not None and (adapters in name or ".modules_to_save." in name)


def _check_room(name: str, folder: str, needed: RoomNeeded, to_be_removed: int = 0) -> None:
    """Check that the disk of a folder has room for what a run will write to it.

    Args:
        name: Name of the option that names the folder.
        folder: Path of the folder, which need not exist.
        needed: Bytes needed, from `room_needed`.
        to_be_removed: Bytes in the folder that the run will remove first. Default: 0.

    Raises:
        ValueError: If the disk lacks room.
    """
    free = free_bytes(folder) + to_be_removed
    if free < needed.peak:
        checkpoints = f" and {needed.written} checkpoints of {_gigabytes(needed.checkpoint)}" * bool(needed.written)
        fewer = " Save less often (save_steps), keep fewer (save_total_limit)," * bool(needed.written)
        raise ValueError(
            f"the run needs {_gigabytes(needed.peak)} on the disk of {name} {folder!r}, for a model of "
            f"{_gigabytes(needed.model)}{checkpoints}, but {_gigabytes(free)} are free there.{fewer or ' Make room,'} "
            "or choose a folder on another disk."
        )


def free_bytes(folder: str | os.PathLike) -> int:
    """Return the free bytes on the disk of a folder.

    Args:
        folder: Path of the folder, which need not exist.
    """
    path = Path(folder).expanduser().absolute()
    return shutil.disk_usage(next(candidate for candidate in (path, *path.parents) if candidate.exists())).free


def size_of(folder: str | os.PathLike) -> int:
    """Return the bytes of disk that the files in a folder and its subfolders take.

    Args:
        folder: Path of the folder, which need not exist.
    """
    return sum(path.lstat().st_blocks * 512 for path in Path(folder).rglob("*"))


def _gigabytes(number: int) -> str:
    return f"{number / 1e9:.3g} GB" if number >= 1e9 else f"{number / 1e6:.3g} MB"


def _steps(arguments: TrainingArguments, dataset: Dataset) -> int:
    """Return the number of optimizer steps of a run."""
    if arguments.max_steps > 0:
        return arguments.max_steps
    assert isinstance(dataset, Sized), "a run on a dataset without a length has max_steps"
    sequences_a_step = arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
    return math.ceil(arguments.num_train_epochs * math.ceil(len(dataset) / sequences_a_step))

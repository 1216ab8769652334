"""Room on the disk of a run: a check before training, and where to keep what was trained if a disk is full after all."""

import contextlib
import dataclasses
import functools
import math
import os
import select
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sized
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import PreTrainedModel, TrainerState, TrainingArguments

from midus_hf.files.checkpoint_files import TRAINER_STATE
from midus_hf.training.optim.freezing import has_adapters
from midus_hf.training.output.run_checkpoints import checkpoints
from midus_hf.training.run_options import RunOptions

# Factor for the files beside the weights: tokenizer, code, log.
_MARGIN = 1.02

# Tensors that AdamW keeps for each parameter that trains, of the parameter's shape and dtype.
_MOMENTS = 2

_SECONDS_BETWEEN_TRIES = 30
_SECONDS_TO_WAIT = 24 * 3600

# Parts of the error messages of `torch.save`; the last one occurs if only the end of a file did not fit.
_OF_A_FILE_CUT_SHORT = ("inline_container", "PytorchStreamWriter", "iostream error")


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
        checkpoint: Checkpoint to resume from; None for a new run.

    Returns:
        The bytes needed in `output_dir`.

    Raises:
        ValueError: If a disk lacks room.
    """
    steps = _steps(arguments, dataset)
    if checkpoint is not None:
        steps -= TrainerState.load_from_json(str(checkpoint / TRAINER_STATE)).global_step
    output = Path(config.output_dir)
    intervals = [config.save_steps, config.eval_steps if config.load_best_model_at_end else None]
    saves = sum(math.ceil(max(steps, 0) / interval) for interval in intervals if interval is not None)
    removed = 0
    if config.overwrite_output_dir:
        removed = sum(path.lstat().st_blocks * 512 for path in output.rglob("*"))
    existing = 0 if config.overwrite_output_dir else len(checkpoints(output))
    room = room_needed(model, dtypes, config, saves, existing, arguments.deepspeed_plugin is not None)
    _check_room("output_dir", config.output_dir, room, removed)
    if config.output_on_failure is not None:
        _check_room("output_on_failure", config.output_on_failure, dataclasses.replace(room, written=0, kept=0), 0)
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
        # Whether the tensor is of an adapter, or of a copy that trains whole, and so no weight.
        is_beside = adapters is not None and (adapters in name or ".modules_to_save." in name)
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


def _check_room(name: str, folder: str, needed: RoomNeeded, to_be_removed: int) -> None:
    """Check that the disk of a folder has room, once the run has removed as many bytes there; `name` is the folder's option."""
    free = free_bytes(folder) + to_be_removed
    if free < needed.peak:
        saved = f" and {needed.written} checkpoints of {_gigabytes(needed.checkpoint)}" * bool(needed.written)
        fewer = " Save less often (save_steps), keep fewer (save_total_limit)," * bool(needed.written)
        raise ValueError(
            f"the run needs {_gigabytes(needed.peak)} on the disk of {name} {folder!r}, for a model of "
            f"{_gigabytes(needed.model)}{saved}, but {_gigabytes(free)} are free there.{fewer or ' Make room,'} "
            "or choose a folder on another disk."
        )


def free_bytes(folder: str | os.PathLike) -> int:
    """Return the free bytes on the disk of a folder, which need not exist."""
    path = Path(folder).expanduser().absolute()
    return shutil.disk_usage(next(candidate for candidate in (path, *path.parents) if candidate.exists())).free


def _gigabytes(number: int) -> str:
    return f"{number / 1e9:.3g} GB" if number >= 1e9 else f"{number / 1e6:.3g} MB"


def _steps(arguments: TrainingArguments, dataset: Dataset) -> int:
    """Return the number of optimizer steps of a run."""
    if arguments.max_steps > 0:
        return arguments.max_steps
    assert isinstance(dataset, Sized), "a run on a dataset without a length has max_steps"
    sequences_a_step = arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
    return math.ceil(arguments.num_train_epochs * math.ceil(len(dataset) / sequences_a_step))


class SaveError(RuntimeError):
    """Error of a run whose model could not be written anywhere."""


def say(line: str) -> None:
    """Print a line on standard error, above a progress bar if there is one; only the main process prints."""
    if PartialState().is_main_process:
        tqdm.write(line, file=sys.stderr)


def write_failure(error: BaseException) -> str | None:
    """Return the system's reason why a file could not be written; None if the error is of another kind."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    text = str(error)
    if isinstance(error, SafetensorError) and "I/O error" in text:
        return text.partition("I/O error: ")[2] or text
    if type(error) is Exception and "(os error " in text:  # raised by tokenizers
        return text.partition(" (os error ")[0]
    # torch.save reports only that its file was cut short, and not why.
    if isinstance(error, RuntimeError) and any(message_part in text for message_part in _OF_A_FILE_CUT_SHORT):
        return "a file could not be written to its end"
    return None


def failure_of(write: Callable[[], None]) -> str | None:
    """Write something; return why a file could not be written, or None if it was. Other errors are raised."""
    try:
        write()
    except Exception as error:
        failure = write_failure(error)
        if failure is None:
            raise
        return failure
    return None


def save_where_possible(
    write: Callable[[Path], None],
    config: RunOptions,
    num_bytes: int,
    waiting: Callable[[], contextlib.AbstractContextManager],
) -> Path:
    """Write to the output of a run or, if that fails, to another folder that has room.

    The folders are tried in this order: the output; then `output_on_failure` or, without it, a new folder among the
    system's temporary files if `num_bytes` fit there. If all fail and a user sits at the terminal of a single process,
    the user is asked to make room, and the output is tried again on Enter, or as soon as there is room.

    All processes call this, with the same arguments.

    Args:
        write: Creates a folder and writes to it; all processes call this function, perhaps several times. After a
            failure it removes the files that it wrote.
        waiting: Returns a context that the program enters while it waits for the user.

    Returns:
        The folder that was written.

    Raises:
        SaveError: If no folder could be written; the message gives the reason for each folder.
    """
    state = PartialState()
    failures: list[str] = []
    places = _places(config, num_bytes, failures, waiting)
    while True:
        next_folder = [next(places, None) if state.is_main_process else None]
        broadcast_object_list(next_folder)
        folder = next_folder[0]
        if folder is None:
            reasons = ["; ".join(failures)]
            broadcast_object_list(reasons)
            raise SaveError(reasons[0])
        outcome = [failure_of(functools.partial(write, folder))]
        broadcast_object_list(outcome)
        if outcome[0] is None:
            return folder
        failures.append(f"{folder}: {outcome[0]}")


def _places(
    config: RunOptions,
    num_bytes: int,
    failures: list[str],
    waiting: Callable[[], contextlib.AbstractContextManager],
) -> Iterator[Path]:
    output = Path(config.output_dir)
    yield output
    say(f"{failures[-1]}. What was trained is still in memory; trying elsewhere.")
    if config.output_on_failure is not None:
        yield Path(config.output_on_failure)
    elif free_bytes(tempfile.gettempdir()) > num_bytes:
        folder = Path(tempfile.mkdtemp(prefix=f"{output.name}-"))
        yield folder
        with contextlib.suppress(OSError):
            folder.rmdir()
    else:
        failures.append(f"{tempfile.gettempdir()}: no room for {num_bytes:,} bytes")
    if PartialState().num_processes == 1 and sys.stdin.isatty() and sys.stderr.isatty():
        deadline = time.monotonic() + _SECONDS_TO_WAIT
        while time.monotonic() < deadline:
            say(
                f"{failures[-1]}. Make room for {num_bytes:,} bytes in {output}, then press Enter; Ctrl-C gives up what "
                "was trained."
            )
            with waiting():
                if not _wait_for_room(output, num_bytes, deadline):
                    return
            yield output


def _wait_for_room(output: Path, num_bytes: int, deadline: float) -> bool:
    """Wait for Enter, or for room on the disk; return false if standard input ends or the deadline passes."""
    while time.monotonic() < deadline:
        readable, _, _ = select.select([sys.stdin], [], [], _SECONDS_BETWEEN_TRIES)
        if readable:
            return sys.stdin.readline() != ""
        if free_bytes(output) > num_bytes:
            return True
    return False

"""Checkpoints of a run: whole or absent, with finite numbers only; failing to write one does not end the run.

Frozen weights lie in separate files, which later checkpoints link. A checkpoint then holds `trained.safetensors`,
`frozen.safetensors` and the index that `from_pretrained` reads. The first two checkpoints write two copies of the
frozen file, and later checkpoints link to the two copies in turn, so that damage to one copy leaves every second
checkpoint whole.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from midus_hf.files.checkpoint_files import BLOCK_STATES, INDEX_FILE, SINGLE_FILE
from midus_hf.files.run_files import remove_written
from midus_hf.training.optim.finite import error_of, first_not_finite, first_not_finite_in, trained_tensors
from midus_hf.training.optim.freezing import has_adapters
from midus_hf.training.output.disk_room import failure_of, say
from midus_hf.training.output.run_checkpoints import (
    begin_checkpoint,
    finish_checkpoint,
    last_checkpoint,
    linked_entries,
    remove_old_checkpoints,
)

_OF_ANOTHER_PROCESS = "another process could not write its part"

# Smallest number of bytes of frozen weights for which a checkpoint has separate files.
_WORTH_A_FILE = 16 * 2**20

_TRAINED, _FROZEN = "trained", "frozen"
_STEM = SINGLE_FILE.removesuffix(".safetensors")


class Checkpoints:
    """Handling of checkpoints by the Trainer of a run, beyond what a `Trainer` does.

    A checkpoint becomes whole with its manifest, which is written when all processes have written their parts and these
    are on the disk. Only then older checkpoints are removed. If a file cannot be written, the unfinished checkpoint is
    removed, and training goes on. Frozen weights that an earlier checkpoint has too are linked.

    Args:
        trainer: A Trainer that has its model and its held-out texts. Every process has its own `Checkpoints`, and all
            processes call the same methods.
        keep: Number of latest checkpoints to keep; None keeps all.
    """

    def __init__(self, trainer: Any, tokenizer: PreTrainedTokenizerBase, keep: int | None):
        self._trainer, self._tokenizer, self._keep = trainer, tokenizer, keep
        # Why the last checkpoint could not be written; None if it was.
        self.failure: str | None = None
        self._parts_failed = False
        self._is_writing = False
        # Whole checkpoints whose frozen weights this process knows, because it wrote or read them, in this order.
        self._known: list[Path] = []
        # Copies of frozen weights to have on the disk at the same time, once there are as many checkpoints.
        self._copies = 1 if keep == 1 else 2

    def save(self, folder: Path, write_parts: Callable[[], None]) -> None:
        """Save a checkpoint; all processes call this.

        Args:
            write_parts: Writes the files that a Trainer writes there.

        Raises:
            FloatingPointError: If a trained tensor or block is not finite; nothing is written then.
        """
        self.check_finite()
        step, is_main = self._trainer.state.global_step, self._trainer.args.should_save
        self.failure, self._parts_failed = None, False
        files_of_user: list[Path] = []
        earlier = self._earlier(folder)

        def begin() -> None:
            if is_main:
                files_of_user.extend(begin_checkpoint(folder))
                self._tokenizer.save_pretrained(folder)

        def write() -> None:
            self._is_writing = True
            try:
                write_parts()
            finally:
                self._is_writing = False

        def finish() -> None:
            if is_main:
                finish_checkpoint(folder, files_of_user, linked_entries(folder, earlier[-2:]))
                self.know(folder)

        failed = any(self._fails(part) for part in (begin, write, finish))
        if not is_main:
            return
        if failed:
            remove_written(folder.parent, folder)
            latest = last_checkpoint(folder.parent)
            say(
                f"checkpoint-{step} was not saved in {folder.parent}: {self.failure}. "
                f"{f'The latest there is {latest.name}' if latest else 'There is none yet'}."
            )
        else:
            remove_old_checkpoints(folder.parent, step, self._keep, self._trainer.held_out.step_to_keep())

    def save_weights(
        self, folder: Path, state_dict: dict[str, Any] | None, save: Callable[[dict[str, Any] | None], None]
    ) -> None:
        """Save a model into a folder; in a checkpoint, link frozen weights that an earlier checkpoint has too.

        Args:
            state_dict: The weights to save; None for the weights of the model.
            save: Saves the model, with all its files, with the weights in its argument; None stands for all weights.

        Raises:
            OSError: If a file cannot be written.
        """
        trainer = self._trainer
        are_whole = state_dict is None and trainer.tables.columns is None and not has_adapters(trainer.model)
        parts = None
        if self._is_writing and trainer.args.should_save and are_whole:
            parts = _parts_of(trainer.model)
        if parts is None:
            save(state_dict)
            return
        trained, frozen = parts
        frozen_files = self._link(folder, frozen)
        if frozen_files is None:
            # The base class's method saves no banks, which are saved with the trained weights.
            PreTrainedModel.save_pretrained(trainer.model, folder, state_dict=dict(frozen))
            frozen_files = _set_apart(folder, _FROZEN)
        save(dict(trained))
        weight_map = {**_set_apart(folder, _TRAINED), **frozen_files}
        total = sum(tensor.nbytes for part in parts for name, tensor in part.items() if name in weight_map)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def save_last_part(self, write: Callable[[], None]) -> None:
        """Write the last part of a checkpoint, of this process; return when all processes have written theirs.

        Raises:
            OSError: If a process could not write its part, now or earlier.
        """
        failure = failure_of(write)
        self._parts_failed = bool(self._trainer.largest(failure is not None))
        if self._parts_failed:
            raise OSError(failure or _OF_ANOTHER_PROCESS)

    def save_in(self, folder: Path) -> None:
        """Save a checkpoint of the current step as `checkpoint-N` in a folder, which need not be the folder of the run.

        Raises:
            OSError: If the checkpoint cannot be written.
        """
        arguments = self._trainer.args
        run_folder, arguments.output_dir = arguments.output_dir, str(folder)
        try:
            self._trainer._save_checkpoint(self._trainer.model)
        finally:
            arguments.output_dir = run_folder
        if self.failure is not None:
            raise OSError(self.failure)

    def load(self, checkpoint: Path) -> None:
        """Load the weights in the folder of a checkpoint into the model."""
        self._trainer._load_from_checkpoint(str(checkpoint))

    def know(self, checkpoint: Path) -> None:
        """Remember the folder of a whole checkpoint whose frozen tensors are equal to the model's."""
        self._known = [*(known for known in self._known if known != checkpoint), checkpoint]

    def check_finite(self) -> None:
        """End the run if a trained tensor or block is not finite, before it is saved; all processes call this.

        Raises:
            FloatingPointError: If a tensor or block is not finite in any process.
        """
        trainer = self._trainer
        block_findings = (bank.first_not_finite() for bank in trainer.blocks.banks)
        finding = first_not_finite(trained_tensors(trainer.model)) or next(filter(None, block_findings), None)
        if trainer.largest(finding is not None):
            raise error_of(finding or "what another process trains is not finite", trainer.state.global_step)

    def first_not_finite_in(self, checkpoint: Path) -> str | None:
        """Return "NAME holds nan" for the first trained tensor or block in a whole checkpoint that is not finite, or None."""
        parameters = self._trainer.model.named_parameters()
        finding = first_not_finite_in(
            checkpoint, (name for name, parameter in parameters if not parameter.requires_grad)
        )
        banks = enumerate(self._trainer.blocks.banks)
        block_findings = (bank.first_not_finite_in(checkpoint / BLOCK_STATES / str(number)) for number, bank in banks)
        return finding or next(filter(None, block_findings), None)

    def _fails(self, part: Callable[[], None]) -> bool:
        """Do a part of saving; return whether any process failed, and set `failure`. All processes call this."""
        failure = failure_of(part)
        # All processes must call `largest` equally often: one that failed before `save_last_part` calls it here, others there.
        failed = self._parts_failed or bool(self._trainer.largest(failure is not None))
        if failed:
            self.failure = failure or _OF_ANOTHER_PROCESS
        return failed

    def _earlier(self, folder: Path) -> list[Path]:
        """Return the known checkpoints beside the one that is being written in a folder."""
        return [path for path in self._known if path != folder and path.parent == folder.parent and path.is_dir()]

    def _link(self, folder: Path, frozen: Mapping[str, torch.Tensor]) -> Mapping[str, str] | None:
        """Link an earlier checkpoint's frozen files; return the file of each tensor, or None if none were linked."""
        known = self._earlier(folder)
        if len(known) < self._copies:
            return None
        source = known[-self._copies]
        weight_map = _frozen_in(source)
        # Files hold one name of tied tensors, so storages are compared rather than names.
        same_tensors = weight_map.keys() <= frozen.keys() and _storages(
            frozen[name] for name in weight_map
        ) == _storages(frozen.values())
        if not same_tensors or not _are_in(
            source, weight_map, frozen
        ):  # the files or the model have been changed since
            return None
        files = set(weight_map.values())
        try:
            for name in files:
                os.link(source / name, folder / name)
        except OSError:  # the file system has no links, or allows no more links
            for name in files:
                (folder / name).unlink(missing_ok=True)
            return None
        return weight_map


def _parts_of(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] | None:
    """Return the tensors that may change in training, buffers included, and the frozen ones, or None.

    None means that the model is saved in one part, since few of its weights are frozen, transformers renames or joins
    its tensors in saving, or it is quantised or dispatched to devices.
    """
    if not isinstance(model, PreTrainedModel) or getattr(model, "_weight_conversions", None) != []:
        return None
    if getattr(model, "hf_quantizer", None) is not None or hasattr(model, "hf_device_map"):
        return None
    trained: dict[str, torch.Tensor] = {}
    frozen: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        (frozen if is_frozen else trained)[name] = tensor.detach()
    return (trained, frozen) if sum(_storages(frozen.values()).values()) >= _WORTH_A_FILE else None


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the size in bytes of each storage that tensors lie in, by its address."""
    return {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in tensors}


def _set_apart(folder: Path, part: str) -> dict[str, str]:
    """Rename the weight files that `save_pretrained` wrote to names of a part; return the file of each tensor."""
    index = folder / INDEX_FILE
    if index.exists():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        index.unlink()
    elif (folder / SINGLE_FILE).exists():
        with safe_open(folder / SINGLE_FILE, "pt") as file:
            weight_map = dict.fromkeys(file.keys(), SINGLE_FILE)
    else:
        weight_map = {}  # no tensor of the model trains
    renamed = {name: part + name.removeprefix(_STEM) for name in set(weight_map.values())}
    for name, new_name in renamed.items():
        os.replace(folder / name, folder / new_name)
    return {tensor: renamed[name] for tensor, name in weight_map.items()}


def _are_in(checkpoint: Path, weight_map: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return whether the files of a checkpoint hold exactly these tensors; this reads every file."""
    try:
        for file_name in set(weight_map.values()):
            with safe_open(checkpoint / file_name, "pt") as file:
                for name in file.keys():
                    written, tensor = file.get_tensor(name), tensors[name].cpu()
                    if written.dtype != tensor.dtype or not torch.equal(written, tensor):
                        return False
    except (OSError, KeyError, SafetensorError):  # a damaged file is not linked
        return False
    return True


def _frozen_in(checkpoint: Path) -> Mapping[str, str]:
    """Return the file of each tensor in the frozen files of a checkpoint; empty if it has none."""
    try:
        weight_map = json.loads((checkpoint / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, LookupError):
        return {}
    return {tensor: name for tensor, name in weight_map.items() if name.startswith(_FROZEN)}

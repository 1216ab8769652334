"""Frozen weights that a run's checkpoints share: they lie in separate files, which later checkpoints link.

A checkpoint then holds `trained.safetensors`, `frozen.safetensors` and the index that `from_pretrained` reads. The
first two checkpoints write two copies of the frozen file, and later checkpoints link to the two copies in turn, so that
damage to one copy leaves every second checkpoint whole.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from midus_hf.files.checkpoint_files import INDEX_FILE, SINGLE_FILE
from midus_hf.files.manifest import Manifest, first_misfit
from midus_hf.training.output.run_checkpoints import manifest_of

# Smallest number of bytes of frozen weights for which a checkpoint has separate files.
_WORTH_A_FILE = 16 * 2**20

_TRAINED, _FROZEN = "trained", "frozen"
_STEM = SINGLE_FILE.removesuffix(".safetensors")


class FrozenWeights:
    """Frozen files of a run's checkpoints whose contents this process knows, because it wrote or read them.

    Args:
        copies: Number of copies to have on the disk at the same time, once there are as many checkpoints.
    """

    def __init__(self, copies: int):
        self.copies = copies
        self._checkpoints: list[Path] = []

    def know(self, checkpoint: Path) -> None:
        """Remember the folder of a whole checkpoint whose frozen tensors are equal to the model's."""
        self._checkpoints = [*(known for known in self._checkpoints if known != checkpoint), checkpoint]

    def earlier(self, folder: Path) -> list[Path]:
        """Return the other checkpoints in the same output that are known to be whole, in the order of writing.

        Args:
            folder: Folder of the checkpoint that is being written.
        """
        return [
            path for path in self._checkpoints if path != folder and path.parent == folder.parent and path.is_dir()
        ]

    def save(
        self, folder: Path, model: nn.Module, save_others: Callable[[dict[str, torch.Tensor] | None], None]
    ) -> None:
        """Save a model into the folder of a checkpoint, with frozen weights in separate files if that is worth it.

        Args:
            folder: Folder of the checkpoint, without weights so far.
            model: The model, of any class.
            save_others: Saves the model with all its files, as `save_pretrained` does, but with only the weights in its
                argument; None stands for all weights.

        Raises:
            OSError: If a file cannot be written.
        """
        parts = _parts_of(model)
        if parts is None:
            save_others(None)
            return
        trained, frozen = parts
        frozen_files = self._link(folder, frozen)
        if frozen_files is None:
            assert isinstance(model, PreTrainedModel)
            # The base class's method saves no banks, which are saved with the trained weights.
            PreTrainedModel.save_pretrained(model, folder, state_dict=dict(frozen))
            frozen_files = _set_apart(folder, _FROZEN)
        save_others(dict(trained))
        weight_map = {**_set_apart(folder, _TRAINED), **frozen_files}
        total = sum(tensor.nbytes for part in parts for name, tensor in part.items() if name in weight_map)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def _link(self, folder: Path, frozen: Mapping[str, torch.Tensor]) -> Mapping[str, str] | None:
        """Link an earlier checkpoint's frozen files; return the file of each tensor, or None if none were linked."""
        known = self.earlier(folder)
        if len(known) < self.copies:
            return None
        source = known[-self.copies]
        manifest = manifest_of(source) or {}
        weight_map = _frozen_in(source)
        linked: Manifest = {name: manifest[name] for name in set(weight_map.values()) if name in manifest}
        # Files hold one name of tied tensors, so storages are compared rather than names.
        same_tensors = weight_map.keys() <= frozen.keys() and _storages(
            frozen[name] for name in weight_map
        ) == _storages(frozen.values())
        if not same_tensors or linked.keys() != set(weight_map.values()) or first_misfit(source, linked) is not None:
            return None
        if not _are_in(source, weight_map, frozen):  # the files or the model have been changed since
            return None
        try:
            for name in linked:
                os.link(source / name, folder / name)
        except OSError:  # the file system has no links, or allows no more links
            for name in linked:
                with contextlib.suppress(FileNotFoundError):
                    (folder / name).unlink()
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

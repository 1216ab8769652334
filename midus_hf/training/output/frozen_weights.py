"""What of a model does not train lies in files of its own, which checkpoints of a run share: later ones link those of earlier ones.

A checkpoint then holds `trained.safetensors`, `frozen.safetensors` and the index that `from_pretrained` reads. Two copies of the
frozen file are written, by the first two checkpoints, and linked in turn, so that damage to one leaves every second checkpoint whole.
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

_WORTH_A_FILE = 16 * 2**20
"""Bytes of frozen weights below which a checkpoint has a single file of weights."""

_TRAINED, _FROZEN = "trained", "frozen"
_STEM = SINGLE_FILE.removesuffix(".safetensors")


class FrozenWeights:
    """The frozen files of a run's checkpoints, of which this process knows what they hold: it has written or read them.

    Args:
        copies: How many are to lie on the disk at the same time, if as many checkpoints do.
    """

    def __init__(self, copies: int):
        self.copies = copies
        self._checkpoints: list[Path] = []

    def know(self, checkpoint: Path) -> None:
        """Remember a whole checkpoint whose frozen tensors are those of the model.

        Args:
            checkpoint: Its folder.
        """
        self._checkpoints = [*(known for known in self._checkpoints if known != checkpoint), checkpoint]

    def earlier(self, folder: Path) -> list[Path]:
        """Return the checkpoints beside one that is being written which are known to be whole, in the order of their writing.

        Args:
            folder: The folder of the one that is being written.
        """
        return [
            path for path in self._checkpoints if path != folder and path.parent == folder.parent and path.is_dir()
        ]

    def save(
        self, folder: Path, model: nn.Module, save_others: Callable[[dict[str, torch.Tensor] | None], None]
    ) -> None:
        """Save a model into the folder of a checkpoint, its frozen weights apart where that is worth it.

        Args:
            folder: The folder, which has no weights.
            model: The model.
            save_others: Saves the model with all that belongs to it, as `save_pretrained` does, but of its weights those alone
                that it is given; None for all.

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
            PreTrainedModel.save_pretrained(
                model, folder, state_dict=dict(frozen)
            )  # alone: banks are saved with the others
            frozen_files = _set_apart(folder, _FROZEN)
        save_others(dict(trained))
        weight_map = {**_set_apart(folder, _TRAINED), **frozen_files}
        total = sum(tensor.nbytes for part in parts for name, tensor in part.items() if name in weight_map)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def _link(self, folder: Path, frozen: Mapping[str, torch.Tensor]) -> Mapping[str, str] | None:
        """Link the frozen files of an earlier checkpoint, if there is one to link; return the file of each tensor."""
        known = self.earlier(folder)
        if len(known) < self.copies:
            return None
        source = known[-self.copies]
        manifest = manifest_of(source) or {}
        weight_map = _frozen_in(source)
        linked: Manifest = {name: manifest[name] for name in set(weight_map.values()) if name in manifest}
        same_tensors = weight_map.keys() <= frozen.keys() and _storages(
            frozen[name] for name in weight_map
        ) == _storages(frozen.values())  # of tied tensors one name is saved
        if not same_tensors or linked.keys() != set(weight_map.values()) or first_misfit(source, linked) is not None:
            return None
        if not _are_in(source, weight_map, frozen):  # someone has changed them since, by whatever route
            return None
        try:
            for name in linked:
                os.link(source / name, folder / name)
        except OSError:  # a file system without links, or one that allows no more of them
            for name in linked:
                with contextlib.suppress(FileNotFoundError):
                    (folder / name).unlink()
            return None
        return weight_map


def _parts_of(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] | None:
    """Return the tensors that may change in training, buffers included, and those that do not; None for a model that is saved whole.

    So is one of which too little is frozen, and one whose tensors transformers renames or joins as it saves them.
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
    """Return the bytes of each storage that tensors lie in, by its address."""
    return {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in tensors}


def _set_apart(folder: Path, part: str) -> dict[str, str]:
    """Give the weights that `save_pretrained` has written the names of a part; return the file of each tensor."""
    index = folder / INDEX_FILE
    if index.exists():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        index.unlink()
    elif (folder / SINGLE_FILE).exists():
        with safe_open(folder / SINGLE_FILE, "pt") as file:
            weight_map = dict.fromkeys(file.keys(), SINGLE_FILE)
    else:
        weight_map = {}  # nothing of the model trains
    renamed = {name: part + name.removeprefix(_STEM) for name in set(weight_map.values())}
    for name, new_name in renamed.items():
        os.replace(folder / name, folder / new_name)
    return {tensor: renamed[name] for tensor, name in weight_map.items()}


def _are_in(checkpoint: Path, weight_map: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return whether the files of a checkpoint hold exactly these tensors; every file is read."""
    try:
        for file_name in set(weight_map.values()):
            with safe_open(checkpoint / file_name, "pt") as file:
                for name in file.keys():
                    written, tensor = file.get_tensor(name), tensors[name].cpu()
                    if written.dtype != tensor.dtype or not torch.equal(written, tensor):
                        return False
    except (OSError, KeyError, SafetensorError):  # what is damaged is not linked
        return False
    return True


def _frozen_in(checkpoint: Path) -> Mapping[str, str]:
    """Return the file of each tensor in the frozen files of a checkpoint; none if it has no such files."""
    try:
        weight_map = json.loads((checkpoint / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, LookupError):
        return {}
    return {tensor: name for tensor, name in weight_map.items() if name.startswith(_FROZEN)}

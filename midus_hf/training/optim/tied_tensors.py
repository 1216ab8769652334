"""Tensors that a model has under several names, of which files hold only one."""

from collections.abc import Iterable

from torch import nn


def other_names(model: nn.Module) -> set[str]:
    """Return the names of tied parameters except for the first name of each."""
    first = {name for name, _ in model.named_parameters()}
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} - first


def really_missing(model: nn.Module, missing: Iterable[str]) -> list[str]:
    """Return the names that a checkpoint lacks, without tensors that the checkpoint has under another name.

    Args:
        model: Model into which the checkpoint was loaded.
        missing: Missing names, from `load_state_dict`.
    """
    missing = list(missing)
    tensors = dict(model.named_parameters(remove_duplicate=False))
    loaded = {id(tensor) for name, tensor in tensors.items() if name not in missing}
    return [name for name in missing if name not in tensors or id(tensors[name]) not in loaded]

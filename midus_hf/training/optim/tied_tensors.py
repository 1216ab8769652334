"""Tensors that a model has under several names: files hold them under one."""

from collections.abc import Iterable

from torch import nn


def other_names(model: nn.Module) -> set[str]:
    """Names of parameters that have another one, which stands before."""
    first = {name for name, _ in model.named_parameters()}
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} - first


def really_missing(model: nn.Module, missing: Iterable[str]) -> list[str]:
    """Of the names that a checkpoint lacks, those of tensors that it has under no other name.

    Args:
        model: That the checkpoint was loaded into.
        missing: As `load_state_dict` returns them.
    """
    missing = list(missing)
    tensors = dict(model.named_parameters(remove_duplicate=False))
    loaded = {id(tensor) for name, tensor in tensors.items() if name not in missing}
    return [name for name in missing if name not in tensors or id(tensors[name]) not in loaded]

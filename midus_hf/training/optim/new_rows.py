"""Training of the rows of new tokens alone, in the tables of a model that have one for each: the other rows keep their bits."""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

_MARK = "trained_rows"
# Hooks by the parameter whose gradient they cut. A copy of a parameter has none of its hooks.
_HOOKS = WeakIdKeyDictionary()


def has_new_tokens(sequences: Iterable[Mapping[str, Any]], rows: range) -> bool:
    """Return whether sequences, with their `input_ids`, have one of the new tokens `rows`; true if there are none of these."""
    return not rows or any(rows.start <= max(each["input_ids"]) for each in sequences)


def train_rows(tables: Iterable[nn.Module], rows: range) -> None:
    """Let some rows of the tables by token train, those of the ids `rows`, by zero gradients of all others.

    The choice is the modules', so that a deep copy of the model trains the same rows. An optimizer must not decay these parameters:
    `parameter_groups` says so.
    """
    for module in tables:
        setattr(module, _MARK, rows)
        module.requires_grad_(True)
        if not any(getattr(hook, "func", None) is _cut_gradients for hook in module._forward_pre_hooks.values()):
            module.register_forward_pre_hook(partial(_cut_gradients))
        _cut_gradients(module)


def train_whole(model: nn.Module) -> None:
    """Undo `train_rows`."""
    for module in model.modules():
        vars(module).pop(_MARK, None)
    for parameter in model.parameters():
        if (hook := _HOOKS.pop(parameter, None)) is not None:
            hook.remove()


def with_trained_rows(model: nn.Module) -> Iterator[tuple[nn.Parameter, range]]:
    """Yield each parameter of which only some rows train, once, with these rows."""
    found: dict[int, tuple[nn.Parameter, range]] = {}
    for module in model.modules():
        if (rows := getattr(module, _MARK, None)) is not None:
            found |= {id(parameter): (parameter, rows) for parameter in module.parameters(recurse=False)}
    yield from found.values()


def frozen_in_rows(parameter: torch.Tensor, rows: range) -> int:
    """Return the number of elements in the rows that do not train."""
    return parameter.numel() // len(parameter) * (len(parameter) - len(rows))


def _cut_gradients(module: nn.Module, inputs: Any = None) -> None:
    """Hook the parameters of a module, unless they are hooked: those of a copy are not."""
    rows = getattr(module, _MARK, None)
    if rows is None or torch.compiler.is_compiling():
        return
    for parameter in module.parameters(recurse=False):
        if parameter.requires_grad and parameter not in _HOOKS:
            _HOOKS[parameter] = parameter.register_hook(partial(_of_rows, rows))


def _of_rows(rows: range, gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient with zeros in all other rows."""
    kept = torch.zeros_like(gradient)
    kept[rows.start : rows.stop] = gradient[rows.start : rows.stop]
    return kept

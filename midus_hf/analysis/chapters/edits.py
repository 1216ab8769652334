"""Edits of chapters that last as long as a context is open: parameters are changed, then restored."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from midus_hf.analysis.chapters.memories import one_memory
from midus_hf.analysis.watched_models import decoder_of, innermost

# Names of the bank's tensors that have one row per memory token.
BANK_ROWS = ("bank", "bank_integers", "bank_scales")


@contextlib.contextmanager
def zero_chapters(
    model: nn.Module, chapters: Sequence[int], *, memory: str | None = None, bank: int | None = None
) -> Iterator[None]:
    """Set the rows of chapters to zero while the context is open. Afterwards the rows are restored, bit for bit.

    Routers still open the chapters, and attention still gives them a share, so a measurement shows what their contents do.

    Args:
        model: A causal language model with chapters. It may be compiled, or wrapped by accelerate or PEFT. Its parameters must
            not be trained while the context is open.
        chapters: Numbers of the chapters, each once.
        memory: Name of the memory, if the model has several memories of chapters. Default: the only one.
        bank: Number of the bank, if the memory has several banks. Default: all banks.

    Raises:
        ValueError: If the model has no chapters or several memories to choose from; if the memory, bank or chapter does not
            exist; if a chapter is repeated; if parameters are offloaded, sharded, or in use by `kept_values`.
    """
    edited = _find(model, memory, bank)
    numbers = _checked(chapters, edited)
    with restored(edited.banks, edited.rows_of(numbers)):
        for parameter in edited.banks:
            with torch.no_grad():
                parameter[edited.rows_of(numbers).to(parameter.device)] = 0
        yield


@contextlib.contextmanager
def swap_chapters(
    model: nn.Module,
    first: int,
    second: int,
    *,
    with_router: bool = False,
    memory: str | None = None,
    bank: int | None = None,
) -> Iterator[None]:
    """Exchange the rows of two chapters while the context is open. Afterwards the rows are restored, bit for bit.

    Args:
        model: A model as in `zero_chapters`.
        first: Number of one chapter.
        second: Number of the other chapter.
        with_router: Whether to exchange the chapters' router weights and biases as well. If both chapters are routed, or both
            are shared, the model then computes the same as before. Default: False.
        memory: Name of the memory, if the model has several memories of chapters. Default: the only one.
        bank: Number of the bank, if the memory has several banks. Default: all banks.

    Raises:
        ValueError: For the reasons of `zero_chapters`.
    """
    edited = _find(model, memory, bank)
    numbers = _checked([first, second], edited)
    routers = edited.routers if with_router else []
    rows, places = edited.rows_of(numbers), torch.tensor(numbers)
    with restored(edited.banks, rows), restored(routers, places):
        for parameters, places_of in ((edited.banks, rows), (routers, places)):
            for parameter in parameters:
                with torch.no_grad():
                    taken = places_of.to(parameter.device)
                    parameter[taken] = parameter[taken.view(2, -1).flip(0).flatten()]
        yield


@runtime_checkable
class _DeclaresTensors(Protocol):
    """A module that holds a bank which layers share. A checkpoint that carries its code has another class for it."""

    declared: Mapping[str, Any]

    def declared_tensor(self, name: str) -> torch.Tensor: ...


@dataclass(frozen=True)
class _EditedTensors:
    """Tensors of a memory of chapters that may be edited.

    Args:
        options: Options of the memory.
        banks: Tensors of the banks with a row per memory token: parameters, or buffers if they hold integers.
        routers: Weights and biases of the routers in the layers that read the banks.
    """

    options: Any
    banks: list[torch.Tensor]
    routers: list[torch.Tensor]

    def rows_of(self, numbers: Sequence[int]) -> torch.Tensor:
        """Return the indices of the chapters' rows, one chapter after another."""
        size = self.options.chapter_tokens
        return (torch.tensor(numbers)[:, None] * size + torch.arange(size)).flatten()


def _find(model: nn.Module, memory: str | None, bank: int | None) -> _EditedTensors:
    hosts = one_memory(model, memory, whole=False)  # `_parameter` refuses offloading and names the tensor
    name, options = hosts[0].name, hosts[0].module.options
    decoder = decoder_of(model)
    tables = decoder.config.memories().tables(name)
    layers_of_banks = [of_bank.layers for of_bank in tables] or [(hosted.layer,) for hosted in hosts]
    if bank is not None and not 0 <= bank < len(layers_of_banks):
        raise ValueError(f"bank is {bank}; expected a number from 0 to {len(layers_of_banks) - 1}.")
    numbers = range(len(layers_of_banks)) if bank is None else [bank]
    layers = {layer for number in numbers for layer in layers_of_banks[number]}
    readers = [module for hosted in hosts if hosted.layer in layers for module in hosted.modules]
    holders = readers
    if tables:
        shared = [decoder.memory_tables[name][str(number)] for number in numbers]
        holders = [module for of_bank in shared for module in innermost(of_bank, _DeclaresTensors)]
    if any(getattr(module, "kept", None) is not None and not module.kept.is_empty for module in readers):
        raise ValueError(
            f"kept_values keeps what memory {name!r} derives from its bank; expected to be outside of it. Open kept_values within."
        )
    return _EditedTensors(
        options,
        [_parameter(module, row) for module in holders for row in BANK_ROWS if row in module.declared],
        [_parameter(module, role) for module in readers for role in ("router_weight", "router_bias")],
    )


def _parameter(module: Any, name: str) -> torch.Tensor:
    """Return a parameter or buffer of a module.

    Raises:
        ValueError: If the tensor is offloaded or sharded.
    """
    parameter = module.declared_tensor(name)
    if parameter.device.type == "meta":
        raise ValueError(f"{name} of a memory is offloaded; expected it on a device. Load the model whole.")
    if isinstance(parameter, DTensor) or tuple(parameter.shape) != tuple(module.declared[name].shape):
        raise ValueError(f"{name} of a memory is sharded; expected it whole. Load the model in one process.")
    return parameter


def _checked(chapters: Sequence[int], edited: _EditedTensors) -> list[int]:
    """Return the numbers of chapters as a list.

    Raises:
        ValueError: If a chapter does not exist or is repeated.
    """
    numbers = list(chapters)
    unknown = [number for number in numbers if type(number) is not int or not 0 <= number < edited.options.chapters]
    if unknown:
        raise ValueError(f"chapter is {unknown[0]!r}; expected a number from 0 to {edited.options.chapters - 1}.")
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"chapters is {numbers}; expected each once.")
    return numbers


@contextlib.contextmanager
def restored(parameters: Sequence[torch.Tensor], rows: torch.Tensor) -> Iterator[None]:
    """Restore the present values of rows of parameters when the context ends, also after an error."""
    before = [parameter.detach()[rows.to(parameter.device)].clone() for parameter in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, values in zip(parameters, before, strict=True):
                parameter[rows.to(parameter.device)] = values

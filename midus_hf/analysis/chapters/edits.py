"""What a model computes without a chapter: its parameters are changed for as long as a context is open."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from midus_hf.analysis.chapters.memories import one_memory
from midus_hf.analysis.watched_models import decoder_of, innermost

BANK_ROWS = ("bank", "bank_integers", "bank_scales")
"""What the tensors of a bank are called that have a row for each memory token."""


@contextlib.contextmanager
def zero_chapters(
    model: nn.Module, chapters: Sequence[int], *, memory: str | None = None, bank: int | None = None
) -> Iterator[None]:
    """Set the rows of chapters to zero while the context is open; then they are as before, bit for bit.

    Routers still open these chapters, and attention still gives them a share, so what is measured is what their contents do.

    Args:
        model: A causal language model with chapters, compiled or not, or what accelerate or PEFT has wrapped around one. Its
            parameters must not be trained within.
        chapters: Their numbers.
        memory: Name of one of several memories of chapters. Default: the only one.
        bank: Number of one of several banks. Default: all.

    Raises:
        ValueError: If the model has no such memory, bank or chapter, or its parameters are offloaded, sharded, or in use by
            `kept_values`.
    """
    found = _find(model, memory, bank)
    numbers = _checked(chapters, found)
    with restored(found.banks, found.rows_of(numbers)):
        for parameter in found.banks:
            with torch.no_grad():
                parameter[found.rows_of(numbers).to(parameter.device)] = 0
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
    """Exchange the rows of two chapters while the context is open; then they are as before, bit for bit.

    Args:
        model: As for `zero_chapters`.
        first: The number of one.
        second: The number of the other.
        with_router: Whether what routers have for them is exchanged as well. The model then computes what it did, if both are
            routed or both are shared. Default: False.
        memory: As for `zero_chapters`.
        bank: As for `zero_chapters`.

    Raises:
        ValueError: As `zero_chapters`.
    """
    found = _find(model, memory, bank)
    numbers = _checked([first, second], found)
    routers = found.routers if with_router else []
    rows, places = found.rows_of(numbers), torch.tensor(numbers)
    with restored(found.banks, rows), restored(routers, places):
        for parameters, places_of in ((found.banks, rows), (routers, places)):
            for parameter in parameters:
                with torch.no_grad():
                    taken = places_of.to(parameter.device)
                    parameter[taken] = parameter[taken.view(2, -1).flip(0).flatten()]
        yield


@runtime_checkable
class _DeclaresTensors(Protocol):
    """What a bank that layers share is in, also where a checkpoint brought its code."""

    declared: Mapping[str, Any]

    def declared_tensor(self, name: str) -> torch.Tensor: ...


@dataclass(frozen=True)
class _Found:
    """The parameters of a memory of chapters in a model.

    Args:
        options: Of the memory.
        banks: What the banks that are edited have of rows: parameters, or buffers where they are integers.
        routers: Weights and biases of the routers of the layers that read these.
    """

    options: Any
    banks: list[torch.Tensor]
    routers: list[torch.Tensor]

    def rows_of(self, numbers: Sequence[int]) -> torch.Tensor:
        """Indices of the rows of chapters, one chapter after the other."""
        size = self.options.chapter_tokens
        return (torch.tensor(numbers)[:, None] * size + torch.arange(size)).flatten()


def _find(model: nn.Module, memory: str | None, bank: int | None) -> _Found:
    hosts = one_memory(model, memory, whole=False)  # of what is offloaded, the parameter is told
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
    return _Found(
        options,
        [_parameter(module, row) for module in holders for row in BANK_ROWS if row in module.declared],
        [_parameter(module, role) for module in readers for role in ("router_weight", "router_bias")],
    )


def _parameter(module: Any, name: str) -> torch.Tensor:
    """A parameter or buffer that is there, whole, to be changed.

    Raises:
        ValueError: If it is not.
    """
    parameter = module.declared_tensor(name)
    if parameter.device.type == "meta":
        raise ValueError(f"{name} of a memory is offloaded; expected it on a device. Load the model whole.")
    if isinstance(parameter, DTensor) or tuple(parameter.shape) != tuple(module.declared[name].shape):
        raise ValueError(f"{name} of a memory is sharded; expected it whole. Load the model in one process.")
    return parameter


def _checked(chapters: Sequence[int], found: _Found) -> list[int]:
    """Numbers of chapters that there are, each once.

    Raises:
        ValueError: If they are not.
    """
    numbers = list(chapters)
    unknown = [number for number in numbers if type(number) is not int or not 0 <= number < found.options.chapters]
    if unknown:
        raise ValueError(f"chapter is {unknown[0]!r}; expected a number from 0 to {found.options.chapters - 1}.")
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"chapters is {numbers}; expected each once.")
    return numbers


@contextlib.contextmanager
def restored(parameters: Sequence[torch.Tensor], rows: torch.Tensor) -> Iterator[None]:
    """Put rows of parameters back as they are now, however the context ends."""
    before = [parameter.detach()[rows.to(parameter.device)].clone() for parameter in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, values in zip(parameters, before, strict=True):
                parameter[rows.to(parameter.device)] = values

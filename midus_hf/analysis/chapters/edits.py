"""What a model computes without a chapter: its parameters are changed for as long as a context is open."""

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn
from torch.distributed.tensor import DTensor

from midus_hf.config.memory_entries import NO_MEMORIES, Memories, MemoryEntry

_TYPE, _ROWS = "chapters", ("bank", "bank_integers", "bank_scales")
"""The type of memory, and what its tensors are called that have a row for each memory token."""


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
    with _restored(found.banks, found.rows_of(numbers)):
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
    with _restored(found.banks, rows), _restored(routers, places):
        for parameters, places_of in ((found.banks, rows), (routers, places)):
            for parameter in parameters:
                with torch.no_grad():
                    taken = places_of.to(parameter.device)
                    parameter[taken] = parameter[taken.view(2, -1).flip(0).flatten()]
        yield


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
    decoder: Any = extract_model_from_parallel(model, keep_torch_compile=False).get_decoder()  # type: ignore[operator]
    memories = decoder.config.memories() if hasattr(decoder.config, "memories") else NO_MEMORIES
    entry = _entry(memories, memory, decoder.config.model_type)
    tables = memories.tables(entry.name)
    layers_of_banks = [of_bank.layers for of_bank in tables] or [(layer,) for layer in entry.layers]
    if bank is not None and not 0 <= bank < len(layers_of_banks):
        raise ValueError(f"bank is {bank}; expected a number from 0 to {len(layers_of_banks) - 1}.")
    numbers = range(len(layers_of_banks)) if bank is None else [bank]
    readers = [
        module
        for number in numbers
        for layer in layers_of_banks[number]
        for module in _declared(decoder, f"layers.{layer}", f"memories.{entry.name}")
    ]
    holders = [
        module for number in numbers for module in _declared(decoder, "memory_tables", f"{entry.name}.{number}")
    ]
    if any(getattr(module, "kept", None) is not None and not module.kept.is_empty for module in readers):
        raise ValueError(
            f"kept_values keeps what memory {entry.name!r} derives from its bank; expected to be outside of it. Open kept_values "
            "within."
        )
    return _Found(
        entry.options,
        [
            _parameter(module, name)
            for module in (holders if tables else readers)
            for name in _ROWS
            if name in module.declared
        ],
        [_parameter(module, name) for module in readers for name in ("router_weight", "router_bias")],
    )


def _entry(memories: Memories, name: str | None, model_type: str) -> MemoryEntry:
    """The entry of the memory of chapters of that name, or for None of the only one."""
    entries = {known: entry for known, entry in memories.attached.items() if entry.type == _TYPE}
    if not entries:
        raise ValueError(
            f"this {model_type} model has no memory of chapters; expected one upscaled with such a memory."
        )
    if name is None and len(entries) > 1:
        raise ValueError(
            f"the model has memories of chapters {', '.join(entries)}; expected one of them. Pass memory."
        )
    if name is not None and name not in entries:
        raise ValueError(f"memory is {name!r}; expected one of: {', '.join(entries)}.")
    return next(iter(entries.values())) if name is None else entries[name]


def _declared(decoder: nn.Module, *parts: str) -> list[Any]:
    """Modules with declared tensors whose names have these parts in this order: wrappers put parts of theirs between and behind."""
    between = r"\.(?:.*\.)?".join(map(re.escape, parts))
    name = re.compile(rf"(?:.*\.)?{between}(?:\..*)?")
    return [
        module
        for path, module in decoder.named_modules()
        if name.fullmatch(path) and hasattr(module, "declared_tensor")
    ]


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
def _restored(parameters: Sequence[torch.Tensor], rows: torch.Tensor) -> Iterator[None]:
    """Put rows of parameters back as they are now, however the context ends."""
    before = [parameter.detach()[rows.to(parameter.device)].clone() for parameter in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, values in zip(parameters, before, strict=True):
                parameter[rows.to(parameter.device)] = values

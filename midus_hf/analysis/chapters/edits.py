"""Edits of chapters that last as long as a context is open: parameters are changed, then restored."""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from midus_hf.analysis.watched_models import HostedMemory, decoder_of, hosted_memories, innermost
from midus_hf.memory.protocols import ReadsChapters

# Names of the bank's tensors that have one row per memory token.
BANK_ROWS = ("bank", "bank_integers", "bank_scales")


def memories_of_chapters(model: nn.Module, name: str | None = None, *, whole: bool = True) -> list[HostedMemory]:
    """Return the memories of a model that read chapters, in the order of layers.

    Args:
        model: A causal language model whose decoder has `layers`. It may be compiled, or wrapped by accelerate or PEFT.
        name: Name of the memory. Default: memories of all names.
        whole: Whether to refuse memories that are offloaded. Default: True.

    Raises:
        ValueError: If no memory reads chapters or has the name, or if a memory is offloaded and `whole` is true.
    """
    lack = "no memory of chapters; expected one upscaled with such a memory"
    return hosted_memories(model, ReadsChapters, lack, name, whole=whole)


def one_memory(model: nn.Module, name: str | None = None, *, whole: bool = True) -> list[HostedMemory]:
    """Return one memory of chapters, once for each layer that it is in. Arguments are as in `memories_of_chapters`.

    Raises:
        ValueError: For the reasons of `memories_of_chapters`; if there are memories of several names and `name` is None.
    """
    hosts = memories_of_chapters(model, name, whole=whole)
    names = dict.fromkeys(hosted.name for hosted in hosts)
    if len(names) > 1:
        raise ValueError(f"the model has memories of chapters {', '.join(names)}; expected one of them. Pass memory.")
    return hosts


def hosts_of(
    model: nn.Module, chapters: Collection[int], layers: Collection[int] | None, memory: str | None
) -> list[HostedMemory]:
    """Return one memory of chapters in each of the requested layers, or in all of its layers, if `layers` is None.

    Raises:
        ValueError: For the reasons of `one_memory`; if one of `chapters` does not exist, or a layer does not read chapters.
    """
    hosts = {hosted.layer: hosted for hosted in one_memory(model, memory)}
    num_chapters = next(iter(hosts.values())).module.num_chapters
    unknown = [number for number in chapters if not 0 <= number < num_chapters]
    if unknown:
        raise ValueError(f"chapter is {unknown[0]}; expected a number from 0 to {num_chapters - 1}.")
    absent = [layer for layer in layers or () if layer not in hosts]
    if absent:
        raise ValueError(f"layer is {absent[0]}; expected one with chapters: {', '.join(map(str, hosts))}.")
    return [hosted for layer, hosted in hosts.items() if layers is None or layer in layers]


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
    banks, _, rows = _edited(model, chapters, memory, bank)
    with restored(banks, rows):
        for parameter in banks:
            with torch.no_grad():
                parameter[rows.to(parameter.device)] = 0
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
    numbers = [first, second]
    banks, routers, rows = _edited(model, numbers, memory, bank)
    routers = routers if with_router else []
    with restored(banks, rows), restored(routers, torch.tensor(numbers)):
        for parameters, indices in ((banks, rows), (routers, torch.tensor(numbers))):
            for parameter in parameters:
                with torch.no_grad():
                    taken = indices.to(parameter.device)
                    parameter[taken] = parameter[taken.view(2, -1).flip(0).flatten()]
        yield


@runtime_checkable
class _DeclaresTensors(Protocol):
    """A module that holds a bank which layers share. A checkpoint that carries its code has another class for it."""

    declared: Mapping[str, Any]

    def declared_tensor(self, name: str) -> torch.Tensor: ...


def _edited(
    model: nn.Module, chapters: Sequence[int], memory: str | None, bank: int | None
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Return what an edit of chapters may change.

    Returns:
        The tensors of the banks with a row per memory token: parameters, or buffers if they hold integers. The weights and
        biases of the routers in the layers that read the banks. The indices of the chapters' rows, chapter after chapter.
    """
    hosts = one_memory(model, memory, whole=False)  # `_parameter` refuses offloading and names the tensor
    name, options = hosts[0].name, hosts[0].module.options
    decoder = decoder_of(model)
    tables = decoder.config.memories().tables(name)
    layers_of_banks = [of_bank.layers for of_bank in tables] or [(hosted.layer,) for hosted in hosts]
    if bank is not None and not 0 <= bank < len(layers_of_banks):
        raise ValueError(f"bank is {bank}; expected a number from 0 to {len(layers_of_banks) - 1}.")
    banks = range(len(layers_of_banks)) if bank is None else [bank]
    layers = {layer for number in banks for layer in layers_of_banks[number]}
    readers = [module for hosted in hosts if hosted.layer in layers for module in hosted.modules]
    holders = readers
    if tables:
        shared = [decoder.memory_tables[name][str(number)] for number in banks]
        holders = [module for of_bank in shared for module in innermost(of_bank, _DeclaresTensors)]
    if any(getattr(module, "kept", None) is not None and not module.kept.is_empty for module in readers):
        raise ValueError(
            f"kept_values keeps what memory {name!r} derives from its bank; expected to be outside of it. Open kept_values within."
        )
    unknown = [number for number in chapters if type(number) is not int or not 0 <= number < options.chapters]
    if unknown:
        raise ValueError(f"chapter is {unknown[0]!r}; expected a number from 0 to {options.chapters - 1}.")
    if len(set(chapters)) < len(chapters):
        raise ValueError(f"chapters is {list(chapters)}; expected each once.")
    return (
        [_parameter(module, row) for module in holders for row in BANK_ROWS if row in module.declared],
        [_parameter(module, role) for module in readers for role in ("router_weight", "router_bias")],
        (torch.tensor(chapters)[:, None] * options.chapter_tokens + torch.arange(options.chapter_tokens)).flatten(),
    )


def _parameter(module: Any, name: str) -> torch.Tensor:
    """Return a parameter or buffer of a module, and refuse one that is offloaded or sharded."""
    parameter = module.declared_tensor(name)
    if parameter.device.type == "meta":
        raise ValueError(f"{name} of a memory is offloaded; expected it on a device. Load the model whole.")
    if isinstance(parameter, DTensor) or tuple(parameter.shape) != tuple(module.declared[name].shape):
        raise ValueError(f"{name} of a memory is sharded; expected it whole. Load the model in one process.")
    return parameter


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

"""Chapters of a loaded model: the memories that read them, and a context in which some chapters are zero."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from midus_hf.look.watched_models import HostedMemory, decoder_of, hosted_memories, innermost
from midus_hf.memory.protocols import ReadsChapters

# Names of the bank's tensors that have one row per memory token.
_BANK_ROWS = ("bank", "bank_integers", "bank_scales")


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


@contextlib.contextmanager
def zero_chapters(model: nn.Module, chapters: Sequence[int], *, memory: str | None = None) -> Iterator[None]:
    """Set the rows of chapters to zero while the context is open. Afterwards the rows are restored, bit for bit.

    Routers still open the chapters, and attention still gives them a share, so a measurement shows what their contents do.

    Args:
        model: A causal language model with chapters. It may be compiled, or wrapped by accelerate or PEFT. Its parameters must
            not be trained while the context is open.
        chapters: Numbers of the chapters, each once.
        memory: Name of the memory, if the model has several memories of chapters. Default: the only one.

    Raises:
        ValueError: If the model has no chapters or several memories to choose from; if the memory or a chapter does not exist;
            if a chapter is repeated; if parameters are offloaded, sharded, or in use by `kept_values`.
    """
    banks, rows = _rows_of(model, chapters, memory)
    before = [bank.detach()[rows.to(bank.device)].clone() for bank in banks]
    try:
        with torch.no_grad():
            for bank in banks:
                bank[rows.to(bank.device)] = 0
        yield
    finally:
        with torch.no_grad():
            for bank, values in zip(banks, before, strict=True):
                bank[rows.to(bank.device)] = values


@runtime_checkable
class _DeclaresTensors(Protocol):
    """A module that holds a bank which layers share. A checkpoint that carries its code has another class for it."""

    declared: Mapping[str, Any]

    def declared_tensor(self, name: str) -> torch.Tensor: ...


def _rows_of(model: nn.Module, chapters: Sequence[int], memory: str | None) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the tensors of a memory's banks with a row per memory token, and the indices of the chapters' rows.

    The tensors are parameters, or buffers if they hold integers.
    """
    hosts = one_memory(model, memory, whole=False)  # `_parameter` refuses offloading and names the tensor
    name, options = hosts[0].name, hosts[0].module.options
    decoder = decoder_of(model)
    readers = [module for hosted in hosts for module in hosted.modules]
    holders = readers
    if tables := decoder.config.memories().tables(name):
        shared = [decoder.memory_tables[name][str(number)] for number in range(len(tables))]
        holders = [module for bank in shared for module in innermost(bank, _DeclaresTensors)]
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
        [_parameter(module, row) for module in holders for row in _BANK_ROWS if row in module.declared],
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

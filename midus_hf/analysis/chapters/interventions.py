"""Interventions in some layers: while a context is open, layers read changed chapters, or routers leave chapters closed."""

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from midus_hf.analysis.chapters.edits import BANK_ROWS, hosts_of, restored
from midus_hf.analysis.watched_models import HostedMemory, held_hooks


@contextlib.contextmanager
def zero_in_layers(
    model: nn.Module, chapter: int, layers: Collection[int], *, memory: str | None = None
) -> Iterator[None]:
    """Let some layers read zeros in place of a chapter while the context is open; other layers read the bank unchanged.

    Args:
        model: A causal language model with chapters, which has an additional hook while the context is open. It may be compiled, or
            wrapped by accelerate or PEFT. Its parameters are not changed.
        chapter: Number of the chapter.
        layers: Indices of decoder layers.
        memory: Name of the memory, if the model has several memories of chapters. Default: the only one.

    Raises:
        ValueError: If the model has no chapters or several memories to choose from; if the chapter does not exist, or a layer does
            not read chapters.
    """

    def zeroed(by_chapter: torch.Tensor) -> torch.Tensor:
        edited = by_chapter.clone()
        edited[chapter] = 0
        return edited

    with _rows_edited(hosts_of(model, [chapter], layers, memory), zeroed):
        yield


@contextlib.contextmanager
def swap_in_layers(
    model: nn.Module, first: int, second: int, layers: Collection[int], *, memory: str | None = None
) -> Iterator[None]:
    """Exchange two chapters in some layers while the context is open: where a router opens one, the layer reads the other.

    Other arguments and errors are as in `zero_in_layers`.
    """

    def swapped(by_chapter: torch.Tensor) -> torch.Tensor:
        edited = by_chapter.clone()
        edited[[first, second]] = by_chapter[[second, first]]
        return edited

    with _rows_edited(hosts_of(model, [first, second], layers, memory), swapped):
        yield


@contextlib.contextmanager
def close_chapters(
    model: nn.Module, chapters: Collection[int], *, layers: Collection[int] | None = None, memory: str | None = None
) -> Iterator[None]:
    """Keep routers from opening chapters while the context is open. They open the next best chapters instead, as after `prune`.

    Args:
        model: A model as in `zero_in_layers`. Biases of its routers are changed while the context is open.
        chapters: Numbers of the chapters, all of them routed.
        layers: Indices of the layers whose routers are changed. Default: all layers that read chapters.
        memory: Name of the memory, if the model has several memories of chapters. Default: the only one.

    Raises:
        ValueError: As `zero_in_layers`; if a chapter is shared, or fewer than k routed chapters would be left.
    """
    hosts = hosts_of(model, chapters, layers, memory)
    numbers = sorted(set(chapters))
    num_shared, options = hosts[0].module.num_shared, hosts[0].module.options
    shared = [number for number in numbers if number < num_shared]
    if shared:
        raise ValueError(
            f"chapter {shared[0]} is shared, which every token reads; expected routed ones, from {num_shared} on. Zero it instead."
        )
    left = hosts[0].module.num_chapters - num_shared - len(numbers)
    if left < options.k:
        raise ValueError(
            f"{left} routed chapters would be left; expected k = {options.k} or more. Close fewer, or zero them instead."
        )
    biases = [module.declared_tensor("router_bias") for hosted in hosts for module in hosted.modules]
    with restored(biases, torch.tensor(numbers, dtype=torch.int64)):
        with torch.no_grad():
            for bias in biases:
                bias[numbers] = -torch.inf
        yield


@contextlib.contextmanager
def _rows_edited(hosts: list[HostedMemory], edit: Any) -> Iterator[None]:
    """Call memories with edited copies of their banks' tensors; `edit` takes and returns them as `[C, M, ...]`."""

    def replace(module: Any, arguments: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        tables = dict(kwargs.get("tables") or {})
        for name in BANK_ROWS:
            if name in module.bank_names:
                table = tables[name] if name in tables else getattr(module, name)
                by_chapter = table.unflatten(0, (module.num_chapters, -1))
                tables[name] = edit(by_chapter).flatten(0, 1)
        return arguments, {**kwargs, "tables": tables}

    with held_hooks() as hold:
        for hosted in hosts:
            for module in hosted.modules:
                hold(module.register_forward_pre_hook(replace, with_kwargs=True))
        yield

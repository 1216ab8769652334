"""What a model computes where some of its layers read other chapters than they hold, or do not open them."""

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from midus_hf.analysis.chapters.edits import BANK_ROWS, restored
from midus_hf.analysis.chapters.memories import one_memory
from midus_hf.analysis.watched_models import HostedMemory, held_hooks


@contextlib.contextmanager
def zero_in_layers(
    model: nn.Module, chapter: int, layers: Collection[int], *, memory: str | None = None
) -> Iterator[None]:
    """Let some layers read zeros in the place of a chapter while the context is open; others that share the bank read it as it is.

    Args:
        model: As for `memories_of_chapters`. Its memories have a hook more while the context is open; parameters stay.
        chapter: Its number.
        layers: Indices of decoder layers.
        memory: Name of one of several memories of chapters. Default: the only one.

    Raises:
        ValueError: As `one_memory`, or if there is no such chapter or layer.
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
    """Let some layers read each of two chapters where the other is opened while the context is open.

    Args:
        model: As for `zero_in_layers`.
        first: The number of one.
        second: The number of the other.
        layers: As for `zero_in_layers`.
        memory: As for `zero_in_layers`.

    Raises:
        ValueError: As `zero_in_layers`.
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
    """Let routers not open chapters while the context is open: they open the next best in their place, as after `prune`.

    Args:
        model: As for `zero_in_layers`. Biases of its routers are changed while the context is open.
        chapters: Their numbers, all of them routed.
        layers: Whose routers. Default: all.
        memory: As for `zero_in_layers`.

    Raises:
        ValueError: As `zero_in_layers`; if a chapter is shared, or fewer routed chapters than k would be left.
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


def hosts_of(
    model: nn.Module, chapters: Collection[int], layers: Collection[int] | None, memory: str | None
) -> list[HostedMemory]:
    """The layers of a memory that are meant.

    Args:
        model: As for `memories_of_chapters`.
        chapters: Numbers that must be chapters of theirs.
        layers: Their indices. Default: all.
        memory: Name of one of several memories of chapters. Default: the only one.

    Raises:
        ValueError: As `one_memory`, or if there is no such chapter or layer.
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
def _rows_edited(hosts: list[HostedMemory], edit: Any) -> Iterator[None]:
    """Call memories with edited copies `[C, M, ...]` of what their bank has by chapter."""

    def replace(module: Any, arguments: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        tables = dict(given.get("tables") or {})
        for name in BANK_ROWS:
            if name in module.bank_names:
                table = tables[name] if name in tables else getattr(module, name)
                by_chapter = table.unflatten(0, (module.num_chapters, -1))
                tables[name] = edit(by_chapter).flatten(0, 1)
        return arguments, {**given, "tables": tables}

    with held_hooks() as hold:
        for hosted in hosts:
            for module in hosted.modules:
                hold(module.register_forward_pre_hook(replace, with_kwargs=True))
        yield

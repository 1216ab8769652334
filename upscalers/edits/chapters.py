"""Edits that move rows of chapters: setting to zero and pruning."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from upscalers.edits.chapter_banks import Bank, ChapterMemory, check_all
from upscalers.edits.checkpoint_edit import Decided, EditRequest, edit_checkpoint
from upscalers.edits.numbers import parse_numbers, written
from upscalers.request.errors import RequestError
from upscalers.tensors.recipes import RowRange, Rows
from upscalers.tensors.writer import OutputTensor

# For each position of the result the chapter of the model that comes there; None is a chapter of zeros.
Origins = Sequence[int | None]


def zero(request: EditRequest, chapters: str) -> dict[str, Any]:
    """Set the rows of chapters to zero. Routers still open these chapters, and attention still gives them a share.

    Args:
        request: The checkpoint to read, the folder to make, and the banks to edit.
        chapters: Numbers of the chapters, such as `"3,7-9"`.

    Returns:
        `{"command", "model", "output", "memory", "banks", "chapters", "chapters_before", "chapters_after",
        "bytes_written", "seconds"}`, where `chapters` is a list of numbers.

    Raises:
        RequestError: If a chapter, the memory or the bank does not exist, or the output cannot be made.
    """

    def decide(memory: ChapterMemory, banks: Sequence[Bank]) -> Decided:
        numbers = parse_numbers(chapters, memory.options.chapters)
        own = range(memory.options.chapters)
        return _arranged(memory, banks, numbers, [None if number in numbers else number for number in own], own)

    return edit_checkpoint("zero", request, decide)


def prune(request: EditRequest, chapters: str) -> dict[str, Any]:
    """Remove chapters with their router weights and biases. The chapters behind them move up.

    Args:
        request: The checkpoint to read and the folder to make.
        chapters: Numbers of the chapters, such as `"3,7-9"`; shared chapters may be among them.

    Returns:
        The same keys as from `zero`.

    Raises:
        RequestError: As for `zero`, or if fewer routed chapters would be left than the router chooses, or the request
            names one of several banks.
    """

    def decide(memory: ChapterMemory, banks: Sequence[Bank]) -> Decided:
        check_all("prune", memory, banks)
        options = memory.options
        numbers = parse_numbers(chapters, options.chapters)
        kept = [number for number in range(options.chapters) if number not in numbers]
        shared = sum(number < options.shared_chapters for number in kept)
        if len(kept) - shared < options.k:
            raise RequestError(
                f"chapters is {written(numbers)!r}, which leaves {len(kept) - shared} chapters to choose k = {options.k} of; "
                "expected k or more. Prune fewer."
            )
        return _arranged(memory, banks, numbers, kept, kept, shared_chapters=shared)

    return edit_checkpoint("prune", request, decide)


def _arranged(
    memory: ChapterMemory,
    banks: Sequence[Bank],
    numbers: tuple[int, ...],
    rows: Origins,
    routers: Origins,
    shared_chapters: int | None = None,
) -> Decided:
    """Return the edit that gives each chapter memory tokens and router of its origins."""
    tensors: dict[str, list[OutputTensor]] = {}

    def make(name: str, origins: Origins, rows_of_chapter: int) -> None:
        stored = memory.model.tensors[name]
        recipe = Rows((len(origins) * rows_of_chapter, *stored.shape[1:]), _ranges(origins, rows_of_chapter, name))
        tensors[name] = [OutputTensor(name, recipe, stored.dtype)]

    for bank in banks:
        for name in bank.rows:
            make(name, rows, memory.options.chapter_tokens)
        for name in (*bank.router_weights, *bank.router_biases):
            make(name, routers, 1)
    options = dataclasses.replace(
        memory.options,
        chapters=len(rows),
        memory_tokens=len(rows) * memory.options.chapter_tokens,
        shared_chapters=memory.options.shared_chapters if shared_chapters is None else shared_chapters,
    )
    return Decided(options, numbers, tensors)


def _ranges(origins: Origins, rows: int, name: str) -> tuple[RowRange, ...]:
    """Return the row ranges of chapters with `rows` rows each; chapters that follow one another in their source are one range."""

    def distance(entry: tuple[int, int | None]) -> int | None:
        position, origin = entry
        return None if origin is None else origin - position

    ranges = []
    for key, entries in itertools.groupby(enumerate(origins), key=distance):
        first, *others = (origin or 0 for _, origin in entries)
        count = (1 + len(others)) * rows
        ranges.append(RowRange(None, 0, count) if key is None else RowRange(name, first * rows, count))
    return tuple(ranges)

"""Edits that move rows of chapters: setting to zero, swapping, pruning, importing."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from upscalers.chapters.banks import Bank, ChapterMemory, check_all
from upscalers.chapters.chapter_file import ChapterFile, open_chapter_file
from upscalers.chapters.checkpoint_edit import Decided, EditRequest, edit_checkpoint
from upscalers.chapters.numbers import parse_numbers, written
from upscalers.request.errors import RequestError
from upscalers.tensors.recipes import RowRange, Rows
from upscalers.tensors.writer import OutputTensor

# Where the chapter in a position of the result comes from: a number below C is that of a chapter of the model, C + i is
# chapter i of a file, and None is a chapter of zeros.
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


def swap(request: EditRequest, chapters: str, with_router: bool = False) -> dict[str, Any]:
    """Exchange the rows of two chapters.

    Args:
        request: The checkpoint to read, the folder to make, and the banks to edit.
        chapters: Numbers of the two chapters, such as `"3,7"`.
        with_router: Whether to exchange the chapters' router weights and biases as well. The model then computes the
            same as before, if both chapters are routed or both are shared. Default: False.

    Returns:
        The same keys as from `zero`.

    Raises:
        RequestError: As for `zero`, or if `chapters` does not name two.
    """

    def decide(memory: ChapterMemory, banks: Sequence[Bank]) -> Decided:
        numbers = parse_numbers(chapters, memory.options.chapters)
        if len(numbers) != 2:
            raise RequestError(f"chapters is {written(numbers)!r}; expected the two that are swapped, such as 3,7.")
        first, second = numbers
        own = range(memory.options.chapters)
        moved = [{first: second, second: first}.get(number, number) for number in own]
        details = {"with_router": with_router}
        return _arranged(memory, banks, numbers, moved, moved if with_router else own, details=details)

    return edit_checkpoint("swap", request, decide)


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


def import_file(
    request: EditRequest, file: str | Path, into: str | None = None, append: bool = False
) -> dict[str, Any]:
    """Replace chapters with the chapters of a file, or append these as new ones, with their router weights and biases.

    Args:
        request: The checkpoint to read, the folder to make, and the banks to edit.
        file: A file that `export` wrote.
        into: Numbers of the chapters to replace, such as `"3,4"`, one for each chapter of the file. Default: the
            numbers that the file's chapters had in their model.
        append: Whether to append the chapters behind the model's own, as routed ones. Default: False.

    Returns:
        The same keys as from `zero`, where `chapters` has the numbers of the imported chapters in the result.

    Raises:
        RequestError: As for `zero`, or if sizes or the number of chapters differ, or an append names one of several
            banks.
    """
    if into is not None and append:
        raise RequestError(f"into is {into!r} and append is given; expected one of them.")
    opened = open_chapter_file(Path(file).expanduser())

    def decide(memory: ChapterMemory, banks: Sequence[Bank]) -> Decided:
        for bank in banks:
            opened.check_fits(memory, bank)
        count, chapters = len(opened.chapters), memory.options.chapters
        if append:
            check_all("append to", memory, banks)
            numbers = tuple(range(chapters, chapters + count))
        else:
            numbers = _replaced_numbers(opened, into, chapters)
        origins = list(range(max(chapters, *(number + 1 for number in numbers))))
        for position, number in enumerate(numbers):
            origins[number] = chapters + position
        details = {"file": opened.path.name, "append": append}
        return _arranged(memory, banks, numbers, origins, origins, details=details, file=opened)

    return edit_checkpoint("import", request, decide)


def _replaced_numbers(file: ChapterFile, into: str | None, num_chapters: int) -> tuple[int, ...]:
    """Return the numbers of the chapters that the chapters of a file replace."""
    if into is not None:
        numbers = parse_numbers(into, num_chapters, "into")
        if len(numbers) != len(file.chapters):
            raise RequestError(
                f"into is {into!r}, which has length {len(numbers)}; expected {len(file.chapters)}, as many as {file.path.name} has "
                "chapters."
            )
        return numbers
    beyond = [number for number in file.chapters if number >= num_chapters]
    if beyond:
        raise RequestError(
            f"{file.path.name} has chapter {beyond[0]}; expected numbers below {num_chapters}, the model's chapters. Pass --into or "
            "--append."
        )
    return file.chapters


def _arranged(
    memory: ChapterMemory,
    banks: Sequence[Bank],
    numbers: tuple[int, ...],
    rows: Origins,
    routers: Origins,
    shared_chapters: int | None = None,
    details: Mapping[str, Any] | None = None,
    file: ChapterFile | None = None,
) -> Decided:
    """Return the edit that gives each chapter memory tokens and router of its origins, some of them from `file` if given."""
    tensors: dict[str, list[OutputTensor]] = {}

    def make(name: str, origins: Origins, rows_of_chapter: int, name_in_file: str) -> None:
        stored = memory.model.tensors[name]
        ranges = _ranges(origins, memory.options.chapters, rows_of_chapter, name, name_in_file)
        recipe = Rows((len(origins) * rows_of_chapter, *stored.shape[1:]), ranges)
        tensors[name] = [OutputTensor(name, recipe, stored.dtype)]

    for bank in banks:
        other = (
            file.bank() if file else bank
        )  # without a file no chapter is imported, so that these names are not used
        for name, name_in_file in zip(bank.rows, other.rows, strict=True):
            make(name, rows, memory.options.chapter_tokens, name_in_file)
        own_routers = (*bank.router_weights, *bank.router_biases)
        for name, name_in_file in zip(own_routers, (*other.router_weights, *other.router_biases), strict=True):
            make(name, routers, 1, name_in_file)
    options = dataclasses.replace(
        memory.options,
        chapters=len(rows),
        memory_tokens=len(rows) * memory.options.chapter_tokens,
        shared_chapters=memory.options.shared_chapters if shared_chapters is None else shared_chapters,
    )
    return Decided(options, numbers, tensors, details or {}, file.sources() if file else {})


def _ranges(origins: Origins, chapters: int, rows: int, own: str, in_file: str) -> tuple[RowRange, ...]:
    """Return the row ranges of chapters with `rows` rows each; chapters that follow one another in their source are one range."""

    def source_of(entry: tuple[int, int | None]) -> tuple[str | None, int]:
        position, origin = entry
        if origin is None:
            return None, 0
        return in_file if origin >= chapters else own, origin - position

    ranges = []
    for (source, _), entries in itertools.groupby(enumerate(origins), key=source_of):
        first, *others = (origin or 0 for _, origin in entries)
        first -= chapters if source == in_file and first >= chapters else 0
        ranges.append(RowRange(source, 0 if source is None else first * rows, (1 + len(others)) * rows))
    return tuple(ranges)

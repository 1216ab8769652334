"""Arrangement of a memory's chapters after an edit: the origin of the chapter in each position."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from midus_hf.config.memories.chapters import ChaptersOptions
from upscalers.chapters.banks import Bank, ChapterMemory
from upscalers.chapters.numbers import written
from upscalers.request.errors import RequestError
from upscalers.tensors.recipes import Recipe
from upscalers.tensors.rows import RowRange, Rows


@dataclass(frozen=True)
class Own:
    """A chapter of the model that is edited.

    Args:
        number: Number of the chapter before the edit.
    """

    number: int


@dataclass(frozen=True)
class Imported:
    """A chapter from a file.

    Args:
        position: Position of the chapter in the file, from 0.
    """

    position: int


# Origin of a chapter; None for a chapter of zeros.
Origin = Own | Imported | None


@dataclass(frozen=True)
class Arrangement:
    """Origins of the chapters of an edited memory.

    Args:
        rows: Origin of each chapter's memory tokens.
        routers: Origin of each chapter's router weights and biases.
        shared_chapters: S, number of shared chapters after the edit.
    """

    rows: tuple[Origin, ...]
    routers: tuple[Origin, ...]
    shared_chapters: int

    def options(self, options: ChaptersOptions) -> ChaptersOptions:
        """Return the options that the memory has after the edit."""
        chapters = len(self.rows)
        return dataclasses.replace(
            options,
            chapters=chapters,
            memory_tokens=chapters * options.chapter_tokens,
            shared_chapters=self.shared_chapters,
        )


def unchanged(options: ChaptersOptions) -> Arrangement:
    """Return the arrangement that leaves every chapter in its position."""
    own: tuple[Origin, ...] = tuple(map(Own, range(options.chapters)))
    return Arrangement(own, own, options.shared_chapters)


def zeroed(options: ChaptersOptions, numbers: Sequence[int]) -> Arrangement:
    """Return the arrangement that sets the rows of chapters to zero, and leaves their routers."""
    rows: list[Origin] = list(unchanged(options).rows)
    for number in numbers:
        rows[number] = None
    return dataclasses.replace(unchanged(options), rows=tuple(rows))


def swapped(options: ChaptersOptions, numbers: Sequence[int], with_router: bool) -> Arrangement:
    """Return the arrangement that exchanges two chapters.

    Raises:
        RequestError: If `numbers` does not name two chapters.
    """
    if len(numbers) != 2:
        raise RequestError(f"chapters is {written(numbers)!r}; expected the two that are swapped, such as 3,7.")
    first, second = numbers
    moved: list[Origin] = list(unchanged(options).rows)
    moved[first], moved[second] = moved[second], moved[first]
    arrangement = dataclasses.replace(unchanged(options), rows=tuple(moved))
    return dataclasses.replace(arrangement, routers=tuple(moved)) if with_router else arrangement


def pruned(options: ChaptersOptions, numbers: Sequence[int]) -> Arrangement:
    """Return the arrangement without the chapters in `numbers`.

    Raises:
        RequestError: If fewer routed chapters are left than the router chooses.
    """
    kept = sorted({*range(options.chapters)} - {*numbers})
    shared = sum(number < options.shared_chapters for number in kept)
    if len(kept) - shared < options.k:
        raise RequestError(
            f"chapters is {written(numbers)!r}, which leaves {len(kept) - shared} chapters to choose k = {options.k} of; expected k "
            "or more. Prune fewer."
        )
    left: tuple[Origin, ...] = tuple(map(Own, kept))
    return Arrangement(left, left, shared)


def replaced(options: ChaptersOptions, numbers: Sequence[int]) -> Arrangement:
    """Return the arrangement with chapters of a file in place of the chapters in `numbers`, in the same order."""
    own: list[Origin] = list(unchanged(options).rows)
    for position, number in enumerate(numbers):
        own[number] = Imported(position)
    return Arrangement(tuple(own), tuple(own), options.shared_chapters)


def appended(options: ChaptersOptions, count: int) -> Arrangement:
    """Return the arrangement with the first `count` chapters of a file behind the model's own."""
    longer = (*unchanged(options).rows, *map(Imported, range(count)))
    return Arrangement(longer, longer, options.shared_chapters)


def recipes(
    memory: ChapterMemory, banks: Sequence[Bank], arrangement: Arrangement, imported: Bank | None = None
) -> Mapping[str, Recipe]:
    """Return recipes of the tensors that an edit changes, by full name.

    Args:
        memory: The memory that is edited.
        banks: The banks of the memory that are edited.
        arrangement: Arrangement of the chapters after the edit.
        imported: Names of the file's tensors; its layers correspond to the layers of each bank, in order. Default: no
            file.
    """
    before, made = unchanged(memory.options), {}

    def make(name: str, origins: tuple[Origin, ...], rows: int, file_name: str) -> None:
        width = memory.model.tensors[name].shape[1:]
        made[name] = Rows((len(origins) * rows, *width), _ranges(origins, rows, name, file_name))

    for bank in banks:
        file = imported or bank  # without a file, no chapter is imported, so that these names are not used
        if arrangement.rows != before.rows:
            for name, file_name in zip(bank.rows, file.rows, strict=True):
                make(name, arrangement.rows, memory.options.chapter_tokens, file_name)
        if arrangement.routers != before.routers:
            for position in range(len(bank.layers)):
                make(bank.router_weights[position], arrangement.routers, 1, file.router_weights[position])
                make(bank.router_biases[position], arrangement.routers, 1, file.router_biases[position])
    return made


def _ranges(origins: Sequence[Origin], rows: int, own: str, imported: str) -> tuple[RowRange, ...]:
    """Return the row ranges of chapters with `rows` rows each, joining ranges that follow each other in their source."""
    ranges: list[RowRange] = []
    for origin in origins:
        match origin:
            case Own(number):
                following = RowRange(own, number * rows, rows)
            case Imported(position):
                following = RowRange(imported, position * rows, rows)
            case None:
                following = RowRange(None, 0, rows)
        if ranges and _continues(following, ranges[-1]):
            ranges[-1] = dataclasses.replace(ranges[-1], count=ranges[-1].count + rows)
            continue
        ranges.append(following)
    return tuple(ranges)


def _continues(rows: RowRange, before: RowRange) -> bool:
    return rows.source == before.source and (rows.source is None or rows.first == before.first + before.count)

"""What an edit makes of a memory's chapters: for each place, which chapter stands there afterwards."""

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
        number: Its number there.
    """

    number: int


@dataclass(frozen=True)
class Imported:
    """A chapter from a file.

    Args:
        place: Its place among those of the file.
    """

    place: int


Origin = Own | Imported | None
"""Where a chapter comes from; None: it is zero."""


@dataclass(frozen=True)
class Arrangement:
    """Where the chapters of an edited memory come from.

    Args:
        rows: Of memory tokens, for each chapter.
        routers: Of what routers have for it.
        shared_chapters: S afterwards.
    """

    rows: tuple[Origin, ...]
    routers: tuple[Origin, ...]
    shared_chapters: int

    def options(self, options: ChaptersOptions) -> ChaptersOptions:
        """The options that the memory has afterwards."""
        chapters = len(self.rows)
        return dataclasses.replace(
            options,
            chapters=chapters,
            memory_tokens=chapters * options.chapter_tokens,
            shared_chapters=self.shared_chapters,
        )


def unchanged(options: ChaptersOptions) -> Arrangement:
    """Every chapter where it is."""
    own: tuple[Origin, ...] = tuple(map(Own, range(options.chapters)))
    return Arrangement(own, own, options.shared_chapters)


def zeroed(options: ChaptersOptions, numbers: Sequence[int]) -> Arrangement:
    """Chapters whose rows are zero; their routers stay."""
    rows: list[Origin] = list(unchanged(options).rows)
    for number in numbers:
        rows[number] = None
    return dataclasses.replace(unchanged(options), rows=tuple(rows))


def swapped(options: ChaptersOptions, numbers: Sequence[int], with_router: bool) -> Arrangement:
    """Two chapters that stand in one another's place.

    Raises:
        RequestError: If the numbers are not two.
    """
    if len(numbers) != 2:
        raise RequestError(f"chapters is {written(numbers)!r}; expected the two that are swapped, such as 3,7.")
    first, second = numbers
    moved: list[Origin] = list(unchanged(options).rows)
    moved[first], moved[second] = moved[second], moved[first]
    arrangement = dataclasses.replace(unchanged(options), rows=tuple(moved))
    return dataclasses.replace(arrangement, routers=tuple(moved)) if with_router else arrangement


def pruned(options: ChaptersOptions, numbers: Sequence[int]) -> Arrangement:
    """All chapters but these.

    Raises:
        RequestError: If fewer are left than the router chooses.
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
    """Chapters of a file in the places of these, the first in the first."""
    own: list[Origin] = list(unchanged(options).rows)
    for place, number in enumerate(numbers):
        own[number] = Imported(place)
    return Arrangement(tuple(own), tuple(own), options.shared_chapters)


def appended(options: ChaptersOptions, count: int) -> Arrangement:
    """The first chapters of a file behind the model's own."""
    longer = (*unchanged(options).rows, *map(Imported, range(count)))
    return Arrangement(longer, longer, options.shared_chapters)


def recipes(
    memory: ChapterMemory, banks: Sequence[Bank], arrangement: Arrangement, imported: Bank | None = None
) -> Mapping[str, Recipe]:
    """Recipes of the tensors that an edit changes, by full name.

    Args:
        memory: That is edited.
        banks: Those of its banks that are.
        arrangement: What they become.
        imported: The names that the tensors of the file have; its layers are those of each bank, in order. Default: no file.
    """
    before, made = unchanged(memory.options), {}

    def make(name: str, origins: tuple[Origin, ...], rows: int, file_name: str) -> None:
        width = memory.model.tensors[name].shape[1:]
        made[name] = Rows((len(origins) * rows, *width), _ranges(origins, rows, name, file_name))

    for bank in banks:
        file = imported or bank  # without a file nothing is asked of it
        if arrangement.rows != before.rows:
            for name, file_name in zip(bank.rows, file.rows, strict=True):
                make(name, arrangement.rows, memory.options.chapter_tokens, file_name)
        if arrangement.routers != before.routers:
            for place in range(len(bank.layers)):
                make(bank.router_weights[place], arrangement.routers, 1, file.router_weights[place])
                make(bank.router_biases[place], arrangement.routers, 1, file.router_biases[place])
    return made


def _ranges(origins: Sequence[Origin], rows: int, own: str, imported: str) -> tuple[RowRange, ...]:
    """The rows of chapters of so many rows, what follows one another in its source in one range."""
    ranges: list[RowRange] = []
    for origin in origins:
        match origin:
            case Own(number):
                following = RowRange(own, number * rows, rows)
            case Imported(place):
                following = RowRange(imported, place * rows, rows)
            case None:
                following = RowRange(None, 0, rows)
        if ranges and _continues(following, ranges[-1]):
            ranges[-1] = dataclasses.replace(ranges[-1], count=ranges[-1].count + rows)
            continue
        ranges.append(following)
    return tuple(ranges)


def _continues(rows: RowRange, before: RowRange) -> bool:
    return rows.source == before.source and (rows.source is None or rows.first == before.first + before.count)

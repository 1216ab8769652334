"""The edits of chapters that move rows: setting them to zero, swapping, pruning, importing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from upscalers.chapters.arrangement import Arrangement, appended, pruned, recipes, replaced, swapped, zeroed
from upscalers.chapters.banks import Bank, ChapterMemory, check_all
from upscalers.chapters.chapter_file import ChapterFile, open_chapter_file
from upscalers.chapters.checkpoint_edit import Decided, EditRequest, edit_checkpoint
from upscalers.chapters.numbers import parse_numbers
from upscalers.request.errors import RequestError
from upscalers.tensors.writer import OutputTensor


def zero(request: EditRequest, chapters: str) -> dict[str, Any]:
    """Set the rows of chapters to zero. Routers still open them, and attention still gives them a share.

    Args:
        request: From what to what.
        chapters: Such as `"3,7-9"`.

    Returns:
        `{"command", "model", "output", "memory", "banks", "chapters", "chapters_before", "chapters_after", "bytes_written",
        "seconds"}`, `chapters` a list of numbers.

    Raises:
        RequestError: If a chapter, the memory or the bank is not there, or the output cannot be made.
    """

    def arrange(memory: ChapterMemory, banks: Sequence[Bank]) -> Decided:
        numbers = parse_numbers(chapters, memory.options.chapters)
        return _decided(memory, banks, zeroed(memory.options, numbers), numbers)

    return edit_checkpoint("zero", request, arrange)


def swap(request: EditRequest, chapters: str, with_router: bool = False) -> dict[str, Any]:
    """Exchange the rows of two chapters.

    Args:
        request: From what to what.
        chapters: The two, such as `"3,7"`.
        with_router: Whether what routers have for them is exchanged as well. The model then computes what it did, if both are
            routed or both are shared. Default: False.

    Returns:
        As `zero`.

    Raises:
        RequestError: As `zero`; if the chapters are not two.
    """

    def arrange(memory: ChapterMemory, banks: Sequence[Bank]) -> Decided:
        numbers = parse_numbers(chapters, memory.options.chapters)
        arrangement = swapped(memory.options, numbers, with_router)
        return _decided(memory, banks, arrangement, numbers, {"with_router": with_router})

    return edit_checkpoint("swap", request, arrange)


def prune(request: EditRequest, chapters: str) -> dict[str, Any]:
    """Take chapters out, with what routers have for them. Those behind move up.

    Args:
        request: From what to what.
        chapters: Such as `"3,7-9"`; shared ones may be among them.

    Returns:
        As `zero`.

    Raises:
        RequestError: As `zero`; if fewer chapters would be left than the router chooses, or only some banks are named.
    """

    def arrange(memory: ChapterMemory, banks: Sequence[Bank]) -> Decided:
        check_all("prune", memory, banks)
        numbers = parse_numbers(chapters, memory.options.chapters)
        return _decided(memory, banks, pruned(memory.options, numbers), numbers)

    return edit_checkpoint("prune", request, arrange)


def import_file(
    request: EditRequest, file: str | Path, into: str | None = None, append: bool = False
) -> dict[str, Any]:
    """Put the chapters of a file in the places of others, or behind them as new ones, with what routers have for them.

    Args:
        request: From what to what.
        file: That `export` wrote.
        into: The places, such as `"3,4"`, one for each of the file's chapters. Default: the numbers that they had.
        append: Put them behind the model's own, as routed ones. Default: False.

    Returns:
        As `zero`; `chapters` are the places.

    Raises:
        RequestError: As `zero`; if sizes or numbers differ, or only some banks are named for an append.
    """
    if into is not None and append:
        raise RequestError(f"into is {into!r} and append is given; expected one of them.")
    opened = open_chapter_file(Path(file).expanduser())

    def arrange(memory: ChapterMemory, banks: Sequence[Bank]) -> Decided:
        for bank in banks:
            opened.check_fits(memory, bank)
        count, chapters = len(opened.chapters), memory.options.chapters
        if append:
            check_all("append to", memory, banks)
            numbers, arrangement = tuple(range(chapters, chapters + count)), appended(memory.options, count)
        else:
            numbers = _places(opened, into, chapters)
            arrangement = replaced(memory.options, numbers)
        asked = {"file": opened.path.name, "append": append}
        return _decided(memory, banks, arrangement, numbers, asked, opened)

    return edit_checkpoint("import", request, arrange)


def _decided(
    memory: ChapterMemory,
    banks: Sequence[Bank],
    arrangement: Arrangement,
    numbers: tuple[int, ...],
    asked: Mapping[str, Any] | None = None,
    file: ChapterFile | None = None,
) -> Decided:
    """An edit that arranges chapters anew, some of them from a file if there is one."""
    made = recipes(memory, banks, arrangement, file.bank() if file else None)
    tensors = {name: [OutputTensor(name, recipe, memory.model.tensors[name].dtype)] for name, recipe in made.items()}
    return Decided(arrangement.options(memory.options), numbers, tensors, asked or {}, file.sources() if file else {})


def _places(file: ChapterFile, into: str | None, num_chapters: int) -> tuple[int, ...]:
    """Where the chapters of a file go."""
    if into is not None:
        numbers = parse_numbers(into, num_chapters, "into")
        if len(numbers) != len(file.chapters):
            raise RequestError(
                f"into is {into!r}, {len(numbers)} places; expected {len(file.chapters)}, as many as {file.path.name} has chapters."
            )
        return numbers
    beyond = [number for number in file.chapters if number >= num_chapters]
    if beyond:
        raise RequestError(
            f"{file.path.name} has chapter {beyond[0]}; expected numbers below {num_chapters}, the model's chapters. Pass --into or "
            "--append."
        )
    return file.chapters

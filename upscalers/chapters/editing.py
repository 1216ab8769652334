"""Edits that move rows of chapters: setting to zero, swapping, pruning, importing."""

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

    def arrange(memory: ChapterMemory, banks: Sequence[Bank]) -> Decided:
        numbers = parse_numbers(chapters, memory.options.chapters)
        return _decided(memory, banks, zeroed(memory.options, numbers), numbers)

    return edit_checkpoint("zero", request, arrange)


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

    def arrange(memory: ChapterMemory, banks: Sequence[Bank]) -> Decided:
        numbers = parse_numbers(chapters, memory.options.chapters)
        arrangement = swapped(memory.options, numbers, with_router)
        return _decided(memory, banks, arrangement, numbers, {"with_router": with_router})

    return edit_checkpoint("swap", request, arrange)


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

    def arrange(memory: ChapterMemory, banks: Sequence[Bank]) -> Decided:
        check_all("prune", memory, banks)
        numbers = parse_numbers(chapters, memory.options.chapters)
        return _decided(memory, banks, pruned(memory.options, numbers), numbers)

    return edit_checkpoint("prune", request, arrange)


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
        details = {"file": opened.path.name, "append": append}
        return _decided(memory, banks, arrangement, numbers, details, opened)

    return edit_checkpoint("import", request, arrange)


def _decided(
    memory: ChapterMemory,
    banks: Sequence[Bank],
    arrangement: Arrangement,
    numbers: tuple[int, ...],
    details: Mapping[str, Any] | None = None,
    file: ChapterFile | None = None,
) -> Decided:
    """Return the edit that arranges chapters anew, some of them from `file` if given."""
    made = recipes(memory, banks, arrangement, file.bank() if file else None)
    tensors = {name: [OutputTensor(name, recipe, memory.model.tensors[name].dtype)] for name, recipe in made.items()}
    return Decided(
        arrangement.options(memory.options), numbers, tensors, details or {}, file.sources() if file else {}
    )


def _places(file: ChapterFile, into: str | None, num_chapters: int) -> tuple[int, ...]:
    """Return the numbers that the chapters of a file get in the result."""
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

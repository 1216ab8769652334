"""The edits of a checkpoint's chapters: another checkpoint, whose other tensors and files are the same bytes."""

import importlib.metadata
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upscalers.chapters.arrangement import Arrangement, appended, pruned, recipes, replaced, swapped, zeroed
from upscalers.chapters.banks import Bank, ChapterMemory, find_memory
from upscalers.chapters.chapter_file import ChapterFile, open_chapter_file
from upscalers.chapters.edit_record import Edit, edited_card, edited_config
from upscalers.chapters.numbers import parse_numbers
from upscalers.checkpoint.base_model import open_base, read_config
from upscalers.checkpoint.source import CARD_FILE, copy_travelling_files, resolve_source
from upscalers.landing.output_folder import OutputFolder
from upscalers.landing.ownership import code_files
from upscalers.record.provenance import (
    EDITS_KEY,
    read_config_entry,
    read_plan,
    read_record,
    write_record,
)
from upscalers.request.errors import RequestError
from upscalers.request.progress import NoProgress, Progress, begin_writing, shown
from upscalers.runs.code import write_code_of
from upscalers.tensors.recipes import Copy
from upscalers.tensors.writer import CheckpointWriter, OutputTensor


@dataclass(frozen=True)
class EditRequest:
    """What every edit of a checkpoint is told.

    Args:
        model: A checkpoint with chapters, trained or not: a folder or a hub id.
        output: The folder to make.
        memory: Name of one of several memories of chapters. Default: the only one.
        bank: Number of one of several banks. Default: all.
        overwrite: As for `upscale`. Default: False.
        progress: Told of every step. Default: silent.
    """

    model: str | Path
    output: str | Path
    memory: str | None = None
    bank: int | None = None
    overwrite: bool = False
    progress: Progress | None = None


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

    def arrange(memory: ChapterMemory, banks: Sequence[Bank]) -> _Decided:
        numbers = parse_numbers(chapters, memory.options.chapters)
        return _Decided(zeroed(memory.options, numbers), numbers)

    return _edit("zero", request, arrange)


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

    def arrange(memory: ChapterMemory, banks: Sequence[Bank]) -> _Decided:
        numbers = parse_numbers(chapters, memory.options.chapters)
        return _Decided(swapped(memory.options, numbers, with_router), numbers, {"with_router": with_router})

    return _edit("swap", request, arrange)


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

    def arrange(memory: ChapterMemory, banks: Sequence[Bank]) -> _Decided:
        _check_all("prune", memory, banks)
        numbers = parse_numbers(chapters, memory.options.chapters)
        return _Decided(pruned(memory.options, numbers), numbers)

    return _edit("prune", request, arrange)


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

    def arrange(memory: ChapterMemory, banks: Sequence[Bank]) -> _Decided:
        for bank in banks:
            opened.check_fits(memory, bank)
        count, chapters = len(opened.chapters), memory.options.chapters
        if append:
            _check_all("append to", memory, banks)
            numbers, arrangement = tuple(range(chapters, chapters + count)), appended(memory.options, count)
        else:
            numbers = _places(opened, into, chapters)
            arrangement = replaced(memory.options, numbers)
        return _Decided(arrangement, numbers, {"file": opened.path.name, "append": append}, opened)

    return _edit("import", request, arrange)


@dataclass(frozen=True)
class _Decided:
    """An edit that was decided on.

    Args:
        arrangement: Of the chapters.
        numbers: What is recorded as its chapters.
        asked: What else is recorded. Default: nothing.
        file: Where chapters come from. Default: the model alone.
    """

    arrangement: Arrangement
    numbers: tuple[int, ...]
    asked: dict[str, Any] | None = None
    file: ChapterFile | None = None


def _edit(
    command: str, request: EditRequest, arrange: Callable[[ChapterMemory, Sequence[Bank]], _Decided]
) -> dict[str, Any]:
    started = time.perf_counter()
    progress = request.progress or NoProgress()
    with resolve_source(str(request.model)) as source:
        config = read_config(source.folder)
        entry = read_config_entry(config, source.folder)
        opened = open_base(source.folder)
        memory = find_memory(opened, request.memory)
        banks = memory.chosen_banks(request.bank)
        decided = arrange(memory, banks)
        options = decided.arrangement.options(memory.options)
        made = recipes(memory, banks, decided.arrangement, decided.file.bank() if decided.file else None)
        shards: dict[str, list[OutputTensor]] = {}
        for name, stored in sorted(opened.tensors.items(), key=lambda item: (str(item[1].file), item[1].start)):
            assert stored.file is not None
            tensor = OutputTensor(name, made.get(name, Copy(stored.shape, name)), stored.dtype)
            shards.setdefault(stored.file.name, []).append(tensor)
        num_bytes = sum(tensor.num_bytes for tensors in shards.values() for tensor in tensors)
        if not read_plan(entry, opened).owns(banks[0].rows[0]):
            progress.warn(
                f"memory {memory.name!r} belongs to the base of this upscaling: what strip gives back will have the edit too."
            )
        edit: Edit = {
            "command": command,
            "chapters": list(decided.numbers),
            "version": importlib.metadata.version("midus-hf"),
            "memory": memory.name,
            "banks": [bank.number for bank in banks],
            **(decided.asked or {}),
        }
        folder = OutputFolder(Path(request.output).expanduser(), source.folder, request.overwrite)
        folder.check_space(num_bytes)
        with folder as partial, shown(progress):
            begin_writing(progress, num_bytes, len(shards))
            sources = {**opened.tensors, **(decided.file.sources() if decided.file else {})}
            written = CheckpointWriter(sources, scan=False, progress=progress).write(partial, shards)
            _write_siblings(source.folder, partial, edited_config(config, memory.name, options, edit), edit)
            open_base(partial)
            folder.commit()
    return {
        "command": command,
        "model": str(request.model),
        "output": str(request.output),
        "memory": memory.name,
        "banks": edit["banks"],
        "chapters": edit["chapters"],
        "chapters_before": memory.options.chapters,
        "chapters_after": options.chapters,
        "bytes_written": written.bytes_written,
        "seconds": time.perf_counter() - started,
    }


def _write_siblings(folder: Path, partial: Path, config: dict[str, Any], edit: Edit) -> None:
    """Write what lies beside the weights: what knows of chapters as it is now, all else as it was."""
    copy_travelling_files(folder, partial)
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    record, card = read_record(folder), folder / CARD_FILE
    if record is not None:
        write_record(partial, {**record, EDITS_KEY: [*(record.get(EDITS_KEY) or []), edit]})
    if card.is_file():
        text = edited_card(card.read_text(encoding="utf-8"), edit)
        (partial / CARD_FILE).write_text(text, encoding="utf-8")
    code = code_files(folder)
    for file in code:
        shutil.copyfile(file, partial / file.name)
    if config.get("auto_map") and not code:  # the hub's client fetches none
        write_code_of(partial)


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


def _check_all(verb: str, memory: ChapterMemory, banks: Sequence[Bank]) -> None:
    """Check that an edit which changes how many chapters there are is one of all banks."""
    if len(banks) < len(memory.banks):
        raise RequestError(
            f"bank is {banks[0].number}; expected none to {verb}, for the {len(memory.banks)} banks of memory {memory.name!r} "
            "have the same number of chapters. Leave --bank out."
        )

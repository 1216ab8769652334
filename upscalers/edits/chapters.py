"""Memories of chapters in a checkpoint: their listing, and chapters set to zero or pruned."""

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from midus_hf.anatomy.record import UpscaleRecord, record_of
from midus_hf.config.errors import RequestError
from midus_hf.memories.moc.options import MocOptions
from midus_hf.memories.registry import ATTACHED, TABLES, MemoryEntry
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint, open_base
from upscalers.checkpoint.safetensors_format import read_tensor
from upscalers.checkpoint.source import resolve_source
from upscalers.edits.checkpoint_edit import EditDetails, EditRequest, edit_checkpoint
from upscalers.request import Progress, show_progress
from upscalers.tensors.recipes import RowRange, Rows
from upscalers.tensors.writer import OutputTensor

# The model's chapter at each position of the result; None is a chapter of zeros.
Origins = Sequence[int | None]

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class ChapterBank:
    """One bank, read by `layers`: full names of its rows, and of router weights and biases per layer."""

    layers: tuple[int, ...]
    rows: str
    router_weights: tuple[str, ...]
    router_biases: tuple[str, ...]


@dataclass(frozen=True)
class ChapterMemory:
    """A memory of chapters in an opened checkpoint, with its entry in the config's `memory` list."""

    model: BaseCheckpoint
    entry: MemoryEntry
    options: MocOptions

    @property
    def name(self) -> str:
        return self.entry.name

    @cached_property
    def banks(self) -> tuple[ChapterBank, ...]:
        tables = self.model.layout.memories.tables(self.name)
        if tables:
            shared = f"{self.model.prefix}{TABLES}.{self.name}"
            return tuple(self._bank(table.layers, f"{shared}.{number}.") for number, table in enumerate(tables))
        return tuple(self._bank((layer,), self._in_layer(layer, "")) for layer in self.entry.layers)

    def _bank(self, layers: tuple[int, ...], prefix: str) -> ChapterBank:
        return ChapterBank(
            layers,
            f"{prefix}bank",
            tuple(self._in_layer(layer, "router_weight") for layer in layers),
            tuple(self._in_layer(layer, "router_bias") for layer in layers),
        )

    def _in_layer(self, layer: int, name: str) -> str:
        return self.model.new_name(layer, f"{ATTACHED}.{self.name}.{name}")


def find_memories(model: BaseCheckpoint, name: str | None = None, only: bool = False) -> list[ChapterMemory]:
    """Return the chapter memories of a model, or the named one; refuse none, and several if `only`."""
    memories = {
        name: ChapterMemory(model, entry, entry.options)
        for name, entry in model.layout.memories.attached.items()
        if isinstance(entry.options, MocOptions)
    }
    if not memories:
        raise RequestError(
            f"{model.folder} has no memory of type 'moc'; expected a model with one. Make it with 'upscale --method moc'."
        )
    if (name is not None and name not in memories) or (only and name is None and len(memories) > 1):
        raise RequestError(
            f"memory is {name!r}; expected one of its chapter memories: {', '.join(memories)}. Pass --memory NAME."
        )
    return list(memories.values()) if name is None else [memories[name]]


def zero(request: EditRequest, chapters: str) -> dict[str, Any]:
    """Set the rows of chapters to zero in every bank; routers still open them.

    Args:
        request: The checkpoint to read and the folder to make.
        chapters: Numbers of the chapters, such as `"3,7-9"`; shared chapters may be among them.

    Returns:
        As from `edit_checkpoint`, with `chapters`, as text, `chapters_before` and `chapters_after`.

    Raises:
        RequestError: If a chapter or the memory does not exist, or the output cannot be made.
    """

    def decide(model: BaseCheckpoint) -> EditDetails:
        (memory,) = find_memories(model, request.memory, only=True)
        all_numbers = range(memory.options.chapters)
        numbers = parse_numbers(chapters, len(all_numbers))
        return _arranged(
            memory, numbers, [None if number in numbers else number for number in all_numbers], all_numbers, {}
        )

    return edit_checkpoint("zero", request, decide)


def prune(request: EditRequest, chapters: str) -> dict[str, Any]:
    """Remove chapters and their router weights in every bank; later chapters move up.

    Arguments and result are as for `zero`.

    Raises:
        RequestError: As for `zero`, or if fewer routed chapters would be left than the router chooses.
    """

    def decide(model: BaseCheckpoint) -> EditDetails:
        (memory,) = find_memories(model, request.memory, only=True)
        options = memory.options
        numbers = parse_numbers(chapters, options.chapters)
        kept = [number for number in range(options.chapters) if number not in numbers]
        shared = sum(number < options.shared_chapters for number in kept)
        if len(kept) - shared < options.k:
            raise RequestError(
                f"chapters is {format_numbers(numbers)!r}, which leaves {len(kept) - shared} chapters to choose k = {options.k} of; "
                "expected k or more. Prune fewer."
            )
        tokens = len(kept) * options.chapter_tokens
        changed = {"chapters": len(kept), "memory_tokens": tokens, "shared_chapters": shared}
        return _arranged(memory, numbers, kept, kept, changed)

    return edit_checkpoint("prune", request, decide)


def _arranged(
    memory: ChapterMemory, numbers: Sequence[int], rows: Origins, routers: Origins, options: dict[str, Any]
) -> EditDetails:
    """Return the edit that arranges chapters: tensors of banks and routers, and what is recorded."""
    tensors: dict[str, list[OutputTensor]] = {}

    def make(name: str, origins: Origins, rows_of_chapter: int) -> None:
        stored = memory.model.tensors[name]
        recipe = Rows((len(origins) * rows_of_chapter, *stored.shape[1:]), _ranges(origins, rows_of_chapter, name))
        tensors[name] = [OutputTensor(name, recipe, stored.dtype)]

    for bank in memory.banks:
        make(bank.rows, rows, memory.options.chapter_tokens)
        for name in (*bank.router_weights, *bank.router_biases):
            make(name, routers, 1)
    counts = {"chapters_before": memory.options.chapters, "chapters_after": len(rows)}
    return EditDetails([memory.name], tensors, {"chapters": format_numbers(numbers), **counts}, {memory.name: options})


def _ranges(origins: Origins, rows: int, name: str) -> tuple[RowRange, ...]:

    def distance(entry: tuple[int, int | None]) -> int | None:
        position, origin = entry
        return None if origin is None else origin - position

    ranges = []
    for key, entries in itertools.groupby(enumerate(origins), key=distance):
        first, *others = (origin or 0 for _, origin in entries)
        count = (1 + len(others)) * rows
        ranges.append(RowRange(None, 0, count) if key is None else RowRange(name, first * rows, count))
    return tuple(ranges)


def parse_numbers(text: str, num_chapters: int) -> tuple[int, ...]:
    """Return the numbers in a list such as `"3,7-9"`, in order; refuse others, repeats, and stray numbers."""
    numbers: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise RequestError(f"chapters is {text!r}; expected numbers and ranges such as 3,7-9.")
        if last >= num_chapters:
            raise RequestError(f"chapters is {text!r}; expected numbers from 0 to {num_chapters - 1}, the model's.")
        numbers += range(first, last + 1)
    if len(set(numbers)) < len(numbers):
        twice = next(number for number in numbers if numbers.count(number) > 1)
        raise RequestError(f"chapters is {text!r}, which names {twice} twice; expected each once.")
    return tuple(numbers)


def format_numbers(numbers: Sequence[int]) -> str:
    """Return numbers as `parse_numbers` reads them, with ranges."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def list_chapters(model: str | Path, memory: str | None = None, progress: Progress | None = None) -> dict[str, Any]:
    """Return statistics of the banks of a checkpoint, reading one chapter at a time.

    Args:
        model: A checkpoint with chapters: a folder or a hub id.
        memory: Name of one memory of chapters. Default: all memories.
        progress: Display that shows every chapter. Default: none.

    Returns:
        `{"model", "memories", "edits"}`. Each memory has its name, site, options, T as `chapter_tokens`, and `banks`. Each bank has
        the `layers` that read it, `row_norms`, the mean norm of the rows per chapter, and `router_biases` per chapter, by layer;
        numbers that are not finite are None.

    Raises:
        RequestError: If the model has no memory of this name.
    """
    progress = progress or Progress()
    with resolve_source(str(model)) as source:
        opened = open_base(source.folder)
        memories = find_memories(opened, memory)
        with show_progress(progress):
            total = sum(one.options.chapters * len(one.banks) for one in memories)
            progress.stage("reading chapters", total, "chapters")
            listed = [
                {
                    "name": one.name,
                    "site": one.entry.site,
                    **dataclasses.asdict(one.options),
                    "chapter_tokens": one.options.chapter_tokens,
                    "banks": [_describe_bank(one, bank, progress) for bank in one.banks],
                }
                for one in memories
            ]
        edits = (record_of(opened.config) or UpscaleRecord()).edits
        return {"model": str(model), "memories": listed, "edits": list(edits)}


def _describe_bank(memory: ChapterMemory, bank: ChapterBank, progress: Progress) -> dict[str, Any]:
    """Return each chapter's mean row norm in a bank, and routers' biases by layer."""
    import torch

    norms = []
    whole = memory.model.tensors[bank.rows]
    chapter = dataclasses.replace(whole, shape=(memory.options.chapter_tokens, *whole.shape[1:]))
    for number in range(memory.options.chapters):
        rows = read_tensor(dataclasses.replace(chapter, start=whole.start + number * chapter.num_bytes))
        norms.append(rows.to(torch.promote_types(rows.dtype, torch.float32)).norm(dim=-1).mean().item())
        progress.advance()
    biases = [read_tensor(memory.model.tensors[name]).double().tolist() for name in bank.router_biases]
    return {
        "layers": list(bank.layers),
        "row_norms": _finite(norms),
        "router_biases": dict(zip(bank.layers, map(_finite, biases), strict=True)),
    }


def _finite(values: Sequence[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]

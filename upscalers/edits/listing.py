"""Listing of a checkpoint's chapters, and what `midus edit` prints."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich.box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from midus_hf.anatomy.record import UpscaleRecord, record_of
from upscalers.checkpoint.base_checkpoint import open_base
from upscalers.checkpoint.computed_tensor import read_tensor
from upscalers.checkpoint.source import resolve_source
from upscalers.edits.chapters import Bank, ChapterMemory, find_memories, written
from upscalers.edits.checkpoint_edit import described
from upscalers.request.progress import Progress, shown

if TYPE_CHECKING:
    import torch


def list_chapters(model: str | Path, memory: str | None = None, progress: Progress | None = None) -> dict[str, Any]:
    """Return statistics of the banks of a checkpoint, reading one chapter at a time.

    Args:
        model: A checkpoint with chapters: a folder or a hub id.
        memory: Name of one memory of chapters. Default: all memories.
        progress: Display that shows every chapter. Default: none.

    Returns:
        `{"model", "memories", "edits"}`. Each memory has its name, its site, its options, T as `chapter_tokens`, and
        its `banks`. Each bank has the `layers` that read it, `row_norms` with the mean norm of the rows per chapter, and
        `router_biases` with the biases per chapter, by layer; numbers that are not finite are None.

    Raises:
        RequestError: If the model has no memory of this name.
    """
    progress = progress or Progress()
    with resolve_source(str(model)) as source:
        opened = open_base(source.folder)
        memories = find_memories(opened, memory)
        with shown(progress):
            total = sum(one.options.chapters * len(one.banks) for one in memories)
            progress.stage("reading chapters", total, "chapters")
            listed = [
                {
                    "name": one.name,
                    "site": one.entry.site,
                    **dataclasses.asdict(one.options),
                    "chapter_tokens": one.options.chapter_tokens,
                    "banks": [_listed_bank(one, bank, progress) for bank in one.banks],
                }
                for one in memories
            ]
        edits = (record_of(opened.config) or UpscaleRecord()).edits
        return {"model": str(model), "memories": listed, "edits": list(edits)}


def _listed_bank(memory: ChapterMemory, bank: Bank, progress: Progress) -> dict[str, Any]:
    norms = []
    for number in range(memory.options.chapters):
        norms.append(_rows(memory, bank, number).norm(dim=-1).mean().item())
        progress.advance()
    biases = [read_tensor(memory.model.tensors[name]).double().tolist() for name in bank.router_biases]
    return {
        "layers": list(bank.layers),
        "row_norms": _finite(norms),
        "router_biases": dict(zip(bank.layers, map(_finite, biases), strict=True)),
    }


def _rows(memory: ChapterMemory, bank: Bank, number: int) -> "torch.Tensor":
    """Return the rows of a chapter, in float32 or wider."""
    import torch

    whole = memory.model.tensors[bank.rows]
    chapter = dataclasses.replace(whole, shape=(memory.options.chapter_tokens, *whole.shape[1:]))
    rows = read_tensor(dataclasses.replace(chapter, start=whole.start + number * chapter.num_bytes))
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


def _finite(values: Sequence[float]) -> list[float | None]:
    """Return numbers as JSON has them, with None for NaN and infinity."""
    return [value if math.isfinite(value) else None for value in values]


def print_chapters(listed: dict[str, Any]) -> None:
    """Print the banks of a checkpoint, as `list_chapters` returned them: a row per chapter."""
    console = Console()
    for memory in listed["memories"]:
        console.print(
            Text(
                f"memory {memory['name']} at {memory['site']}: {memory['chapters']} chapters of {memory['chapter_tokens']:,} rows"
                f", {memory['shared_chapters']} of them shared; routing {memory['routing']}, k = {memory['k']}"
            )
        )
        for number, bank in enumerate(memory["banks"]):
            biases = list(bank["router_biases"].values())
            table = Table(box=rich.box.SIMPLE_HEAD, show_edge=False)
            for column in ("chapter", "", "row norm", "lowest bias", "highest bias"):
                table.add_column(column, no_wrap=True)
            for chapter, norm in enumerate(bank["row_norms"]):
                known = [layer_biases[chapter] for layer_biases in biases if layer_biases[chapter] is not None]
                kind = "shared" if chapter < memory["shared_chapters"] else "routed"
                figures = (norm, min(known, default=None), max(known, default=None))
                table.add_row(str(chapter), kind, *map(_figure, figures))
            console.print(Text(f"\nbank {number}, read by layers {written(bank['layers'])}; biases of their routers"))
            console.print(table)
    for edit in listed["edits"]:
        console.print(Text(f"edited: {described(edit)}"))


def print_edit(result: dict[str, Any]) -> None:
    """Print what an edit did, by its result."""
    beside = ("model", "output", "bytes_written", "seconds")
    edit = {key: value for key, value in result.items() if key not in beside}
    Console().print(Text(f"{result['output']}: {described(edit)}"), soft_wrap=True)


def _figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"

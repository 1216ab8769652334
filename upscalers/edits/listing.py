"""Listing of a checkpoint's chapters and of the entries of its glossary, and what `midus edit` prints."""

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
from midus_hf.config.errors import RequestError
from midus_hf.config.wording import format_count
from midus_hf.files.checkpoint_files import GLOSSARY_FILE, TRAVELLING
from midus_hf.memories.moc.options import ChaptersOptions
from midus_hf.memories.packs.options import PacksOptions
from upscalers.checkpoint.base_checkpoint import open_base
from upscalers.checkpoint.computed_tensor import read_tensor
from upscalers.checkpoint.source import fetch_files, resolve_source
from upscalers.edits.chapters import Bank, ChapterMemory, find_memories, written
from upscalers.edits.checkpoint_edit import described
from upscalers.methods.engram import tokenizer_of
from upscalers.request.progress import Progress, shown

if TYPE_CHECKING:
    import torch


# Characters of a text that are printed of an entry.
_SHOWN_CHARACTERS = 60


def list_memories(model: str | Path, memory: str | None = None, progress: Progress | None = None) -> dict[str, Any]:
    """Return what a checkpoint's memories contain that edits change: entries of a glossary, and chapters.

    Args:
        model: A checkpoint with packs or chapters: a folder or a hub id.
        memory: Name of one memory. Default: all memories.
        progress: Display that shows every chapter. Default: none.

    Returns:
        What `list_entries` and `list_chapters` return, as far as the model has such memories.

    Raises:
        RequestError: If the model has neither, or no such memory of this name.
    """
    with resolve_source(str(model), config_only=True) as source:
        attached = open_base(source.folder, needs_weights=False).layout.memories.attached
    kinds = {name: type(entry.options) for name, entry in attached.items() if memory in (None, name)}
    listed: dict[str, Any] = {}
    if any(issubclass(kind, PacksOptions) for kind in kinds.values()):
        listed |= list_entries(model)
    if any(issubclass(kind, ChaptersOptions) for kind in kinds.values()):
        listed |= list_chapters(model, memory, progress)
    if not listed:
        named = "memory" if memory is None else f"memory {memory!r}"
        raise RequestError(
            f"{model} has no {named} of type 'packs' or 'moc', whose entries or chapters could be listed; its memories are: "
            f"{', '.join(attached) or 'none'}. midus edit blocks lists blocks of topics."
        )
    return listed


def list_entries(model: str | Path) -> dict[str, Any]:
    """Return the entries of a checkpoint's glossary, which needs its tokenizer and no weights.

    Args:
        model: A checkpoint with packs: a folder or a hub id.

    Returns:
        `{"model", "max_tokens", "entries"}`: the number of tokens of a text that are read at most, and for each entry
        `{"names", "text", "exact", "tokens"}`, with the number of tokens of the whole text.

    Raises:
        RequestError: If the glossary or the tokenizer cannot be read.
    """
    from midus_hf.memories.packs.glossary import read_glossary
    from midus_hf.memories.packs.names import Spelling

    with resolve_source(str(model), config_only=True) as source:
        fetch_files(source, (GLOSSARY_FILE,), TRAVELLING)
        opened = open_base(source.folder, needs_weights=False)
        options = (entry.options for entry in opened.layout.memories.attached.values())
        (most,) = (each.max_tokens for each in options if isinstance(each, PacksOptions))
        entries = read_glossary(source.folder)
        ids = Spelling(tokenizer_of(opened)).ids_of([entry.text for entry in entries], False) if entries else []
    return {
        "model": str(model),
        "max_tokens": most,
        "entries": [
            {"names": list(entry.names), "text": entry.text, "exact": entry.exact, "tokens": len(its_ids)}
            for entry, its_ids in zip(entries, ids, strict=True)
        ],
    }


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


def print_memories(listed: dict[str, Any]) -> None:
    """Print what `list_memories` returned: a line per entry, and a row per chapter."""
    if "entries" in listed:
        _print_entries(listed["entries"], listed["max_tokens"])
    if "memories" in listed:
        _print_chapters(listed)


def _print_entries(entries: Sequence[dict[str, Any]], most: int) -> None:
    tokens = sum(entry["tokens"] for entry in entries)
    print(f"{format_count(len(entries), 'entry')} of {format_count(tokens, 'token')}")
    for entry in entries:
        names = " / ".join(entry["names"]) + " (exact)" * entry["exact"]
        read = f", of which {most:,} are read" * (entry["tokens"] > most)
        text = " ".join(entry["text"].split())
        text = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
        print(f"{names}: {text} ({format_count(entry['tokens'], 'token')}{read})")


def _print_chapters(listed: dict[str, Any]) -> None:
    console = Console()
    for memory in listed["memories"]:
        console.print(
            Text(
                f"memory {memory['name']} at {memory['site']}: {format_count(memory['chapters'], 'chapter')} of "
                f"{format_count(memory['chapter_tokens'], 'row')}"
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

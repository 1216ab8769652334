"""Listing of a checkpoint's chapters."""

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midus_hf.files.ownership import CONFIG_KEY, has_config_entry
from upscalers.checkpoint.base_model import open_base
from upscalers.checkpoint.source import resolve_source
from upscalers.edits.chapter_banks import Bank, ChapterMemory, find_memories, find_memory
from upscalers.record.provenance import EDITS_KEY
from upscalers.request.progress import Progress, shown

if TYPE_CHECKING:
    import torch


def list_chapters(
    model: str | Path, memory: str | None = None, bank: int | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Return what the banks of a checkpoint hold, reading one chapter at a time.

    Args:
        model: A checkpoint with chapters: a folder or a hub id.
        memory: Name of one memory of chapters. Default: all memories.
        bank: Number of one bank. Default: all banks.
        progress: Display that shows every chapter. Default: none.

    Returns:
        `{"model", "memories", "edits"}`. Each memory has its name, its site, its options, T as `chapter_tokens`, and
        its `banks`. Each bank has its number as `bank`, the `layers` that read it, `row_norms` with the mean norm of
        the rows per chapter, and `router_biases` with the biases per chapter, by layer.

    Raises:
        RequestError: If the model has no memory or bank of this name or number.
    """
    progress = progress or Progress()
    with resolve_source(str(model)) as source:
        opened = open_base(source.folder)
        by_name = find_memories(opened) if memory is None else {memory: find_memory(opened, memory)}
        chosen = {name: one.chosen_banks(bank) for name, one in by_name.items()}
        with shown(progress):
            total = sum(by_name[name].options.chapters * len(banks) for name, banks in chosen.items())
            progress.stage("reading chapters", total, "chapters")
            memories = [_described(by_name[name], banks, progress) for name, banks in chosen.items()]
        entry = opened.config[CONFIG_KEY] if has_config_entry(opened.config) else {}
        return {"model": str(model), "memories": memories, "edits": entry.get(EDITS_KEY) or []}


def _described(memory: ChapterMemory, banks: tuple[Bank, ...], progress: Progress) -> dict[str, Any]:
    return {
        "name": memory.name,
        "site": memory.entry.site,
        **dataclasses.asdict(memory.options),
        "chapter_tokens": memory.options.chapter_tokens,
        "banks": [_described_bank(memory, bank, progress) for bank in banks],
    }


def _described_bank(memory: ChapterMemory, bank: Bank, progress: Progress) -> dict[str, Any]:
    from upscalers.checkpoint.computed_tensor import read_tensor

    norms = []
    for number in range(memory.options.chapters):
        norms.append(_rows(memory, bank, number).norm(dim=-1).mean().item())
        progress.advance()
    biases = (read_tensor(memory.model.tensors[name]).double().tolist() for name in bank.router_biases)
    return {
        "bank": bank.number,
        "layers": list(bank.layers),
        "row_norms": list(map(_number, norms)),
        "router_biases": {
            layer: list(map(_number, of_layer)) for layer, of_layer in zip(bank.layers, biases, strict=True)
        },
    }


def _rows(memory: ChapterMemory, bank: Bank, number: int) -> "torch.Tensor":
    """Return the rows of a chapter, in float32 or wider."""
    import torch

    from midus_hf.ops.chapters.quantisation import dequantise_rows
    from upscalers.checkpoint.computed_tensor import read_tensor

    def read(name: str) -> torch.Tensor:
        whole = memory.model.tensors[name]
        chapter = dataclasses.replace(whole, shape=(memory.options.chapter_tokens, *whole.shape[1:]))
        return read_tensor(dataclasses.replace(chapter, start=whole.start + number * chapter.num_bytes))

    first, *scales = map(read, bank.rows)
    if memory.options.bank_bits is not None:
        return dequantise_rows(first, scales[0], memory.options.bank_bits, torch.float32)
    return first.to(torch.promote_types(first.dtype, torch.float32))


def _number(value: float) -> float | None:
    """Return a number as JSON has it, with None for NaN and infinity."""
    return value if math.isfinite(value) else None

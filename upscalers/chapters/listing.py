"""Telling which chapters a checkpoint has."""

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midus_hf.files.ownership import CONFIG_KEY, has_config_entry
from upscalers.chapters.banks import Bank, ChapterMemory, find_memories, find_memory
from upscalers.checkpoint.base_model import open_base
from upscalers.checkpoint.source import resolve_source
from upscalers.record.provenance import EDITS_KEY
from upscalers.request.progress import NoProgress, Progress, shown

if TYPE_CHECKING:
    import torch


def list_chapters(
    model: str | Path, memory: str | None = None, bank: int | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Read what the banks of a checkpoint hold, one chapter in memory at a time.

    Args:
        model: A checkpoint with chapters.
        memory: Name of one of several memories of chapters. Default: all.
        bank: Number of one of several banks. Default: all.
        progress: Told of every chapter. Default: silent.

    Returns:
        `{"model", "memories", "edits"}`. Each memory has its name, its site, its options, T as `chapter_tokens` and its `banks`,
        each with its `bank` number, the `layers` that read it, `row_norms`, the mean norm of the rows of each chapter, and
        `router_biases`, by layer, of each chapter.

    Raises:
        RequestError: If the model has no such memory or bank.
    """
    progress = progress or NoProgress()
    with resolve_source(str(model)) as source:
        opened = open_base(source.folder)
        found = find_memories(opened) if memory is None else {memory: find_memory(opened, memory)}
        chosen = {name: one.chosen_banks(bank) for name, one in found.items()}
        with shown(progress):
            total = sum(found[name].options.chapters * len(banks) for name, banks in chosen.items())
            progress.stage("reading chapters", total, "chapters")
            memories = [_described(found[name], banks, progress) for name, banks in chosen.items()]
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
    from upscalers.runs.streamed_model import read_tensor

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
    """The rows of a chapter, of float32 or more."""
    import torch

    from midus_hf.ops.chapters.quantisation import dequantise_rows
    from upscalers.runs.streamed_model import read_tensor

    def read(name: str) -> torch.Tensor:
        whole = memory.model.tensors[name]
        chapter = dataclasses.replace(whole, shape=(memory.options.chapter_tokens, *whole.shape[1:]))
        return read_tensor(dataclasses.replace(chapter, start=whole.start + number * chapter.num_bytes))

    first, *scales = map(read, bank.rows)
    if memory.options.bank_bits is not None:
        return dequantise_rows(first, scales[0], memory.options.bank_bits, torch.float32)
    return first.to(torch.promote_types(first.dtype, torch.float32))


def _number(value: float) -> float | None:
    """A number as JSON has it: None for what is not finite."""
    return value if math.isfinite(value) else None

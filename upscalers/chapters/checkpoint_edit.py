"""One edit of a checkpoint's chapters: another checkpoint, whose other tensors and files are the same bytes."""

import copy
import importlib.metadata
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from midus_hf.config.memories.chapters import ChaptersOptions
from midus_hf.files.ownership import CONFIG_KEY, has_config_entry
from upscalers.architecture.families import Config
from upscalers.chapters.banks import Bank, ChapterMemory, find_memory
from upscalers.chapters.numbers import written
from upscalers.checkpoint.banks import bytes_of_banks, carry_banks
from upscalers.checkpoint.base_model import open_base, read_config
from upscalers.checkpoint.safetensors_format import StoredTensor
from upscalers.checkpoint.source import resolve_source
from upscalers.record.provenance import EDITS_KEY, read_config_entry, read_plan
from upscalers.request.progress import NoProgress, Progress, begin_writing, shown
from upscalers.runs.edited_checkpoint import edited_shards, write_siblings
from upscalers.runs.output_folder import OutputFolder
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


@dataclass(frozen=True)
class Decided:
    """An edit that was decided on.

    Args:
        options: That the memory has afterwards.
        numbers: Of the chapters, as they are recorded.
        tensors: By the name of each tensor that does not stay as it is, what is written in its place.
        asked: What else is recorded. Default: nothing.
        sources: Tensors from elsewhere that recipes read. Default: none.
    """

    options: ChaptersOptions
    numbers: tuple[int, ...]
    tensors: Mapping[str, Sequence[OutputTensor]]
    asked: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, StoredTensor] = field(default_factory=dict)


def edit_checkpoint(
    command: str, request: EditRequest, decide: Callable[[ChapterMemory, Sequence[Bank]], Decided]
) -> dict[str, Any]:
    """Write the checkpoint that an edit makes of another one.

    Args:
        command: What the edit is called.
        request: From what to what.
        decide: Decides, for a memory and those of its banks that are edited, what becomes of them.

    Returns:
        `{"command", "model", "output", "memory", "banks", "chapters", "chapters_before", "chapters_after", "bytes_written",
        "seconds"}`, `chapters` a list of numbers.

    Raises:
        RequestError: If the memory or the bank is not there, or the output cannot be made.
    """
    started = time.perf_counter()
    progress = request.progress or NoProgress()
    with resolve_source(str(request.model)) as source:
        config = read_config(source.folder)
        entry = read_config_entry(config, source.folder)
        opened = open_base(source.folder)
        memory = find_memory(opened, request.memory)
        banks = memory.chosen_banks(request.bank)
        decided = decide(memory, banks)
        if not read_plan(entry, opened).owns(banks[0].rows[0]):
            progress.warn(
                f"memory {memory.name!r} belongs to the base of this upscaling: what strip gives back will have the edit too."
            )
        edit: Edit = {
            "command": command,
            "chapters": written(decided.numbers),
            "version": importlib.metadata.version("midus-hf"),
            "memory": memory.name,
            "banks": [bank.number for bank in banks],
            **decided.asked,
        }
        shards = edited_shards(opened, decided.tensors)
        num_bytes = sum(tensor.num_bytes for tensors in shards.values() for tensor in tensors)
        folder = OutputFolder(request.output, source.folder, request.overwrite)
        folder.check_space(num_bytes + bytes_of_banks(source.folder, opened.memories.banks))
        with folder as partial, shown(progress):
            begin_writing(progress, num_bytes, len(shards))
            writer = CheckpointWriter({**opened.tensors, **decided.sources}, scan=False, progress=progress)
            done = writer.write(partial, shards)
            carry_banks(source.folder, partial, opened.memories.banks)
            write_siblings(
                source.folder,
                partial,
                edited_config(config, memory.name, decided.options, edit),
                lambda record: {**record, EDITS_KEY: [*(record.get(EDITS_KEY) or []), edit]},
                lambda card: edited_card(card, edit),
            )
            open_base(partial)
            folder.commit()
    return {
        "command": command,
        "model": str(request.model),
        "output": str(request.output),
        "memory": memory.name,
        "banks": edit["banks"],
        "chapters": list(decided.numbers),
        "chapters_before": memory.options.chapters,
        "chapters_after": decided.options.chapters,
        "bytes_written": done.bytes_written,
        "seconds": time.perf_counter() - started,
    }


Edit = dict[str, Any]
"""`{"command", "chapters", "version", "memory", "banks"}`, chapters as people write them, and what else was asked for."""

_EDITED = ("memory_tokens", "chapters", "shared_chapters", "bank_bits")
"""The options that follow an edit."""

_HEADING = "## Edited chapters"


def edited_config(config: Config, memory: str, options: ChaptersOptions, edit: Edit) -> Config:
    """The config after an edit.

    Where the memory belongs to the base of an upscaling, that base's config in the record says the same, so that `strip` gives
    back a model whose config fits its tensors.

    Args:
        config: The raw config before it.
        memory: Name of the memory.
        options: That it has afterwards.
        edit: What is recorded.
    """
    config = copy.deepcopy(config)
    for entry in config.get("memory") or []:
        if entry.get("type") == options.type and entry.get("name", options.type) == memory:
            entry.update({name: getattr(options, name) for name in _EDITED})
            if has_config_entry(config):
                record = config[CONFIG_KEY]
                record[EDITS_KEY] = [*(record.get(EDITS_KEY) or []), edit]
                record["base_config"] = edited_config(record["base_config"], memory, options, edit)
    return config


def edited_card(card: str, edit: Edit) -> str:
    """A model card with one more edit at its end."""
    asked = ", ".join(f"{key} {_said(value)}" for key, value in edit.items() if key not in ("command", "version"))
    line = f"- `midus edit chapters {edit['command']}` of midus_hf {edit['version']}: {asked}\n"
    if _HEADING in card:
        return f"{card.rstrip()}\n{line}"
    told = "What stands above tells of the upscaling, its numbers included. Since then:"
    return f"{card.rstrip()}\n\n{_HEADING}\n\n{told}\n\n{line}"


def _said(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

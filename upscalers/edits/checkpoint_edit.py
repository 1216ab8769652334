"""Edits of a checkpoint's chapters: each writes another checkpoint, in which all other tensors and files stay the same."""

import copy
import importlib.metadata
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from midus_hf.config.memories.chapters import ChaptersOptions
from midus_hf.files.ownership import CONFIG_KEY, has_config_entry
from upscalers.architecture.family import Config
from upscalers.checkpoint.base_model import open_base, read_config
from upscalers.checkpoint.source import resolve_source
from upscalers.edits.chapter_banks import Bank, ChapterMemory, find_memory
from upscalers.edits.numbers import written
from upscalers.record.provenance import EDITS_KEY, read_config_entry, read_plan
from upscalers.request.progress import Progress
from upscalers.runs.edited_checkpoint import write_edited
from upscalers.runs.output_folder import OutputFolder
from upscalers.tensors.writer import OutputTensor


@dataclass(frozen=True)
class EditRequest:
    """The request that all edits of chapters share.

    Args:
        model: A checkpoint with chapters, trained or not: a folder or a hub id.
        output: The folder to make.
        memory: Name of the memory, needed if the model has several memories of chapters. Default: the only one.
        bank: Number of the bank to edit. Default: all banks.
        overwrite: Whether to replace an existing checkpoint, under the conditions of `upscale`. Default: False.
        progress: Display that shows every step. Default: none.
    """

    model: str | Path
    output: str | Path
    memory: str | None = None
    bank: int | None = None
    overwrite: bool = False
    progress: Progress | None = None


@dataclass(frozen=True)
class Decided:
    """Details of an edit that was decided on.

    Args:
        options: Options of the memory after the edit.
        numbers: Numbers of the edited chapters, for the record.
        tensors: Tensors to write instead of a tensor, by the name of each tensor that does not stay as it is.
        details: Further details of the request, for the record. Default: none.
    """

    options: ChaptersOptions
    numbers: tuple[int, ...]
    tensors: Mapping[str, Sequence[OutputTensor]]
    details: Mapping[str, Any] = field(default_factory=dict)


def edit_checkpoint(
    command: str, request: EditRequest, decide: Callable[[ChapterMemory, Sequence[Bank]], Decided]
) -> dict[str, Any]:
    """Write a copy of a checkpoint with an edit applied to its chapters.

    Args:
        command: Name of the edit in the record.
        request: The checkpoint to read, the folder to make, and the banks to edit.
        decide: Function that decides on the edit, from the memory and the banks of the memory that are edited.

    Returns:
        `{"command", "model", "output", "memory", "banks", "chapters", "chapters_before", "chapters_after",
        "bytes_written", "seconds"}`, where `chapters` is a list of numbers.

    Raises:
        RequestError: If the memory or the bank does not exist, or the output cannot be made.
    """
    started = time.perf_counter()
    progress = request.progress or Progress()
    with resolve_source(str(request.model)) as source:
        entry = read_config_entry(read_config(source.folder), source.folder)
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
            **decided.details,
        }
        bytes_written = write_edited(
            opened,
            OutputFolder(request.output, source.folder, request.overwrite),
            decided.tensors,
            _edited_config(opened.config, memory.name, decided.options, edit),
            lambda record: {**record, EDITS_KEY: [*(record.get(EDITS_KEY) or []), edit]},
            lambda card: _edited_card(card, edit),
            progress,
        )
    return {
        "command": command,
        "model": str(request.model),
        "output": str(request.output),
        "memory": memory.name,
        "banks": edit["banks"],
        "chapters": list(decided.numbers),
        "chapters_before": memory.options.chapters,
        "chapters_after": decided.options.chapters,
        "bytes_written": bytes_written,
        "seconds": time.perf_counter() - started,
    }


# Record of an edit: `{"command", "chapters", "version", "memory", "banks"}`, and further details of the request.
Edit = dict[str, Any]

# Names of the options that an edit may change.
_EDITED = ("memory_tokens", "chapters", "shared_chapters", "bank_bits")

_HEADING = "## Edited chapters"


def _edited_config(config: Config, memory: str, options: ChaptersOptions, edit: Edit) -> Config:
    """Return the config after an edit, with the edit recorded."""
    config = copy.deepcopy(config)
    for entry in config.get("memory") or []:
        if entry.get("type") == options.type and entry.get("name", options.type) == memory:
            entry.update({name: getattr(options, name) for name in _EDITED})
            if has_config_entry(config):
                record = config[CONFIG_KEY]
                record[EDITS_KEY] = [*(record.get(EDITS_KEY) or []), edit]
                # If the memory belongs to the base, `strip` writes a model whose config fits its tensors.
                record["base_config"] = _edited_config(record["base_config"], memory, options, edit)
    return config


def _edited_card(card: str, edit: Edit) -> str:
    """Return a model card with a line about the edit at its end."""
    shown = {**edit, "banks": ", ".join(map(str, edit["banks"]))}
    changes = ", ".join(f"{key} {value}" for key, value in shown.items() if key not in ("command", "version"))
    line = f"- `midus edit {edit['command']}` of midus_hf {edit['version']}: {changes}\n"
    if _HEADING in card:
        return f"{card.rstrip()}\n{line}"
    heading = "The text and the numbers above describe the model after its upscaling. Since then:"
    return f"{card.rstrip()}\n\n{_HEADING}\n\n{heading}\n\n{line}"

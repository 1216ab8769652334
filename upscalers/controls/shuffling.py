"""The control `shuffled-addresses`: a trained checkpoint whose rows of values stand in each other's places."""

import importlib.metadata
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midus_hf.config.controls import num_value_rows
from midus_hf.config.memory_entries import ATTACHED, INSERTED, TABLES
from upscalers.checkpoint.banks import bytes_of_banks, carry_banks
from upscalers.checkpoint.base_model import BaseModel, open_base, read_config
from upscalers.checkpoint.safetensors_format import StoredTensor
from upscalers.checkpoint.source import resolve_source
from upscalers.controls.shuffle_record import Shuffle, shuffled_card, shuffled_config, shuffled_record
from upscalers.record.provenance import read_config_entry, read_plan
from upscalers.request.errors import RequestError
from upscalers.request.options import check_seed
from upscalers.request.progress import NoProgress, Progress, begin_writing, shown
from upscalers.runs.edited_checkpoint import edited_shards, write_siblings
from upscalers.runs.output_folder import OutputFolder
from upscalers.tensors.recipes import Recipe, tensor_seed
from upscalers.tensors.writer import CheckpointWriter, OutputTensor

_CHUNK_BYTES = 1 << 22


def shuffle(
    model: str | Path, output: str | Path, seed: int = 0, overwrite: bool = False, progress: Progress | None = None
) -> dict[str, Any]:
    """Permute the rows of all tables of values, so that what a memory finds is not what it looked for.

    All tables of one memory in one layer, or that layers share as one, have the same order where they have as many rows: a slot's
    pre-value stays with its value. No row stays where it was. One table is in memory at a time.

    Args:
        model: A checkpoint with memory, trained or not: a folder or a hub id.
        output: The folder to make.
        seed: Of the orders. Default: 0.
        overwrite: As for `upscale`. Default: False.
        progress: Told of every step. Default: silent.

    Returns:
        `{"model", "output", "seed", "memories", "same_function", "tables", "bytes_written", "seconds"}`: the names of memories,
        inserted ones by their type; whether all their values are zero, so that the model computes what it did; and how many tables
        were shuffled.

    Raises:
        RequestError: If the seed is no number from 0, the model was not made by `upscale` or has no rows of values, or the output
            cannot be made.
    """
    check_seed(seed)
    started = time.perf_counter()
    progress = progress or NoProgress()
    with resolve_source(str(model)) as source:
        config = read_config(source.folder)
        entry = read_config_entry(config, source.folder)
        opened = open_base(source.folder)
        tables = dict(_tables(opened))
        if not tables:
            raise RequestError(
                f"{source.folder} has no table of values with a row for each of several slots; expected a model with a memory that "
                "retrieves rows, such as one of the method midus-hml."
            )
        plan = read_plan(entry, opened)
        if not all(plan.owns(name) for name in tables):
            progress.warn(
                "some of the memories belong to the base of this upscaling: what strip gives back will be shuffled too."
            )
        told: Shuffle = {
            "seed": seed,
            "version": importlib.metadata.version("midus-hf"),
            "memories": list(dict.fromkeys(tables.values())),
            "same_function": not any(_holds_anything(opened.tensors[name]) for name in tables),
        }
        shards = edited_shards(opened, {name: [_permuted(opened, name, seed)] for name in tables})
        num_bytes = sum(tensor.num_bytes for tensors in shards.values() for tensor in tensors)
        folder = OutputFolder(output, source.folder, overwrite)
        folder.check_space(num_bytes + bytes_of_banks(source.folder, opened.memories.banks))
        with folder as partial, shown(progress):
            begin_writing(progress, num_bytes, len(shards))
            done = CheckpointWriter(opened.tensors, scan=False, progress=progress).write(partial, shards)
            carry_banks(source.folder, partial, opened.memories.banks)
            write_siblings(
                source.folder,
                partial,
                shuffled_config(config, told),
                lambda record: shuffled_record(record, told),
                lambda card: shuffled_card(card, told),
            )
            open_base(partial)
            folder.commit()
    return {
        "model": str(model),
        "output": str(output),
        **{key: value for key, value in told.items() if key != "version"},
        "tables": len(tables),
        "bytes_written": done.bytes_written,
        "seconds": time.perf_counter() - started,
    }


def _tables(model: BaseModel) -> Iterator[tuple[str, str]]:
    """The full name of each table of values with several rows, and what its memory is called."""
    for entry in model.memories.entries:
        memory = entry.name or entry.type
        within = f"{ATTACHED}.{entry.name}" if entry.is_attached else INSERTED
        places = [
            (model.new_name(layer, within), entry.tensors_at(layer, model.memories.sizes)) for layer in entry.layers
        ]
        if entry.is_attached:
            shared = f"{model.prefix}{TABLES}.{entry.name}"
            tables = enumerate(model.memories.tables(entry.name))
            places += [(f"{shared}.{number}", of_table.tensors) for number, of_table in tables]
        for place, tensors in places:
            for name, tensor in tensors.items():
                if num_value_rows(tensor) > 1:
                    yield f"{place}.{name}", memory


def _permuted(model: BaseModel, name: str, seed: int) -> OutputTensor:
    stored, place = model.tensors[name], name.removeprefix(model.prefix).rpartition(".")[0]
    return OutputTensor(name, PermutedRows(stored.shape, name, tensor_seed(seed, place)), stored.dtype)


def _holds_anything(tensor: StoredTensor) -> bool:
    """Whether a stored tensor has a byte that is not zero."""
    assert tensor.file is not None
    with tensor.file.open("rb", buffering=0) as file:
        file.seek(tensor.start, os.SEEK_SET)
        left = tensor.num_bytes
        while left:
            chunk = file.read(min(left, _CHUNK_BYTES))
            if chunk.strip(b"\0"):
                return True
            assert chunk, f"{tensor.file} ended {left} bytes early"
            left -= len(chunk)
    return False


if TYPE_CHECKING:
    import torch

    from upscalers.tensors.recipes import ReadTensor


@dataclass(frozen=True)
class PermutedRows(Recipe):
    """The rows of a table, the dimension before the last, in another order: none stays where it was.

    Args:
        source: Full name of the table, which has two rows or more. Where it has more dimensions, all that stand in front have the
            same order.
        seed: The same seed and number of rows, the same order.
    """

    source: str
    seed: int

    def build(self, read: "ReadTensor") -> "torch.Tensor":
        return read(self.source).index_select(-2, row_order(self.shape[-2], self.seed))


def row_order(rows: int, seed: int) -> "torch.Tensor":
    """For each place `[rows]`, which row comes to it: one random cycle through all of them.

    Args:
        rows: How many, two or more.
        seed: Of the cycle.
    """
    import torch

    cycle = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    order = torch.empty_like(cycle)
    order[cycle] = cycle.roll(1)
    return order

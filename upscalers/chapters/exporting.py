"""Export of chapters from a checkpoint into a file."""

import os
import tempfile
from pathlib import Path
from typing import Any

from midus_hf.files.checkpoint_files import SINGLE_FILE
from midus_hf.files.whole_files import put_in_place
from upscalers.chapters.banks import Bank, ChapterMemory, find_memory, row_names
from upscalers.chapters.chapter_file import is_chapter_file, metadata, router_bias, router_weight, seal
from upscalers.chapters.numbers import parse_numbers
from upscalers.checkpoint.base_model import open_base
from upscalers.checkpoint.source import resolve_source
from upscalers.request.errors import RequestError
from upscalers.tensors.recipes import RowRange, Rows
from upscalers.tensors.writer import CheckpointWriter, OutputTensor

_SUFFIX = ".safetensors"


def export(
    model: str | Path,
    chapters: str,
    output: str | Path,
    memory: str | None = None,
    bank: int | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write chapters of one bank, with the router weights and biases of the bank's layers, into one file.

    Args:
        model: A checkpoint with chapters: a folder or a hub id.
        chapters: Numbers of the chapters, such as `"3,7-9"`.
        output: The file to make, which ends in `.safetensors`.
        memory: Name of the memory, needed if the model has several memories of chapters. Default: the only one.
        bank: Number of the bank, needed if the memory has several. Default: the only one.
        overwrite: Whether to replace an existing file of chapters. Default: False.

    Returns:
        `{"command", "model", "output", "memory", "bank", "chapters", "bytes_written"}`.

    Raises:
        RequestError: If a chapter, the memory or the bank does not exist, or the file cannot be made.
    """
    file = Path(output).expanduser()
    _check_output(file, overwrite)
    with resolve_source(str(model)) as source:
        opened = open_base(source.folder)
        source_memory = find_memory(opened, memory)
        banks = source_memory.chosen_banks(bank)
        if len(banks) > 1:
            raise RequestError(
                f"memory {source_memory.name!r} has {len(banks)} banks; expected one of them to export from. Pass --bank N."
            )
        numbers = parse_numbers(chapters, source_memory.options.chapters)
        description = metadata(source_memory, banks[0], numbers, source.label)
        with tempfile.TemporaryDirectory(prefix=f".{file.name}.", dir=file.parent) as folder:
            shards = {SINGLE_FILE: _tensors(source_memory, banks[0], numbers)}
            written = CheckpointWriter(opened.tensors, scan=False).write(Path(folder), shards, description)
            seal(Path(folder, SINGLE_FILE))
            put_in_place(Path(folder, SINGLE_FILE), file)
    return {
        "command": "export",
        "model": str(model),
        "output": str(output),
        "memory": source_memory.name,
        "bank": banks[0].number,
        "chapters": list(numbers),
        "bytes_written": written.bytes_written,
    }


def _tensors(memory: ChapterMemory, bank: Bank, numbers: tuple[int, ...]) -> list[OutputTensor]:
    def taken(name: str, source: str, rows: int) -> OutputTensor:
        stored = memory.model.tensors[source]
        ranges = tuple(RowRange(source, number * rows, rows) for number in numbers)
        return OutputTensor(name, Rows((len(numbers) * rows, *stored.shape[1:]), ranges), stored.dtype)

    rows = zip(row_names(memory.options.bank_bits), bank.rows, strict=True)
    tensors = [taken(name, source, memory.options.chapter_tokens) for name, source in rows]
    for layer, weight, bias in zip(bank.layers, bank.router_weights, bank.router_biases, strict=True):
        tensors += [taken(router_weight(layer), weight, 1), taken(router_bias(layer), bias, 1)]
    return tensors


def _check_output(file: Path, overwrite: bool) -> None:
    if file.suffix != _SUFFIX:
        raise RequestError(f"output is {str(file)!r}; expected a file that ends in {_SUFFIX}.")
    if not file.absolute().parent.is_dir():
        raise RequestError(f"output is {str(file)!r}, in a folder that does not exist; create it first.")
    if os.path.lexists(file):
        if not overwrite:
            raise RequestError(f"output {file} exists; pass --overwrite to replace it, or choose another file.")
        if not is_chapter_file(file):
            raise RequestError(
                f"output {file} holds no chapters, so --overwrite will not replace it; expected a file that "
                "'midus edit export' wrote. Choose another file."
            )

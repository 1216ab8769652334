"""Edits of a checkpoint's memories into another checkpoint, all else the same; shuffled rows."""

import contextlib
import copy
import dataclasses
import importlib.metadata
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midus_hf.anatomy.record import RECORD_KEY, has_record, record_of
from midus_hf.config.declared_tensors import DeclaredTensor
from midus_hf.config.errors import RequestError
from midus_hf.files.cards import read_card, without_results, write_card
from midus_hf.files.checkpoint_files import CARD, CODE, CONFIG, RECORD, WEIGHTS, indexed_weights, is_of
from midus_hf.memories.bank import banks_of
from midus_hf.memories.controls import num_value_rows
from midus_hf.memories.registry import ATTACHED, INSERTED, TABLES, memory_type, tensors_in_layer
from upscalers.architecture.layer_tensors import Config
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint, open_base, read_config, write_config
from upscalers.checkpoint.source import copy_travelling_files, resolve_source, total_bank_bytes, travelling_files
from upscalers.record.provenance import EDITS_KEY, read_plan, read_record, read_upscaled, write_record
from upscalers.request import Progress, check_seed
from upscalers.runs.writing import CheckpointFolder, write_code_of, written_from
from upscalers.tensors.recipes import Built, Copy, tensor_seed
from upscalers.tensors.writer import OutputTensor

if TYPE_CHECKING:
    import torch

    from upscalers.tensors.recipes import ReadTensor

_HEADING = "## Edits"


@dataclass(frozen=True)
class EditRequest:
    """The request that all edits share.

    Args:
        model: A checkpoint with memory, trained or not: a folder or a hub id.
        output: The folder to make. Default: None, the glossary in the model's own folder is changed; other edits need one.
        memory: Name of the memory, or type of an inserted one. Default: all memories, or the only one if an edit needs one.
        overwrite: Whether to replace an existing checkpoint, under the conditions of `upscale`. Default: False.
        progress: Display that shows every step. Default: none.
    """

    model: str | Path
    output: str | Path | None = None
    memory: str | None = None
    overwrite: bool = False
    progress: Progress | None = None

    def required_output(self) -> str | Path:
        """Return the folder to make, or raise `RequestError` if there is none."""
        if self.output is None:
            raise RequestError(
                "output is missing; expected the folder to make, since only a glossary is changed in place. Pass --output DIR."
            )
        return self.output


@dataclass(frozen=True)
class EditDetails:
    """An edit: its memories, replacing tensors, entries for the record, and changed options by memory."""

    memories: Sequence[str]
    tensors: Mapping[str, Sequence[OutputTensor]]
    details: Mapping[str, Any]
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def edit_checkpoint(
    command: str, request: EditRequest, decide: Callable[[BaseCheckpoint], EditDetails]
) -> dict[str, Any]:
    """Write a copy of a checkpoint with an edit, which config, record and card list as `command`."""
    started = time.perf_counter()
    output = request.required_output()
    progress = request.progress or Progress()
    with resolve_source(str(request.model)) as source:
        opened = open_base(source.folder)
        decided = decide(opened)
        if has_record(opened.config):
            plan = read_plan(read_upscaled(opened.config, source.folder), opened)
            if not all(plan.owns(name) for name in decided.tensors):
                progress.warn(
                    "some of the edited tensors belong to the base of this upscaling: the base that strip restores has the edit too."
                )
        result = {"command": command, "memories": list(decided.memories), **decided.details}
        edit = {**result, "version": importlib.metadata.version("midus-hf")}
        shards: dict[str, list[OutputTensor]] = {}  # the files and the order of the model
        for name, stored in sorted(opened.tensors.items(), key=lambda item: (str(item[1].file), item[1].start)):
            assert stored.file is not None
            kept = [OutputTensor(name, Copy(stored.shape, name), stored.dtype)]
            shards.setdefault(stored.file.name, []).extend(decided.tensors.get(name, kept))
        banks = banks_of(opened.layout.memories)
        folder = CheckpointFolder(output, source.folder, request.overwrite)
        with written_from(opened, folder, shards, banks, progress, stored_name=opened.stored_name) as written:
            _write_siblings(opened, folder.partial, edit, decided.options, progress)
            open_base(folder.partial)
    return {
        **result,
        "model": str(request.model),
        "output": str(output),
        "bytes_written": written.bytes_written,
        "seconds": time.perf_counter() - started,
    }


def shuffle(
    model: str | Path, output: str | Path, seed: int = 0, overwrite: bool = False, progress: Progress | None = None
) -> dict[str, Any]:
    """Permute the rows of all tables of values, so that a slot yields another slot's value.

    Tables of one memory in one layer, or in one table that layers share, get the same order if they have as many rows, so a slot's
    pre-value stays with its value. Every row is moved. One table is in memory at a time.

    Args:
        model: A checkpoint with memory, trained or not: a folder or a hub id.
        output: The folder to make.
        seed: Seed of the orders, from 0 to 2^63 - 1. Default: 0.
        overwrite: Whether to replace an existing checkpoint, under the conditions of `upscale`. Default: False.
        progress: Display that shows every step. Default: none.

    Returns:
        As from `edit_checkpoint`, with `seed`, and `tables`, the number of shuffled tables.

    Raises:
        RequestError: If the seed is out of range, the model has no rows of values, or the output cannot be made.
    """
    check_seed(seed)

    def decide(opened: BaseCheckpoint) -> EditDetails:
        tables = {name: memory for name, memory, tensor in _value_tables(opened) if num_value_rows(tensor) > 1}
        if not tables:
            raise RequestError(
                f"{opened.folder} has no table of values with a row for each of several slots; expected a model with a memory that "
                "retrieves rows, such as one of the method midus-hml."
            )
        tensors = {}
        for name in tables:
            stored = opened.tensors[name]
            owner = name.removeprefix(opened.prefix).rpartition(".")[0]
            recipe = PermutedRows(stored.shape, name, tensor_seed(seed, owner))
            tensors[name] = [OutputTensor(name, recipe, stored.dtype)]
        return EditDetails(list(dict.fromkeys(tables.values())), tensors, {"seed": seed, "tables": len(tables)})

    return edit_checkpoint("shuffle", EditRequest(model, output, None, overwrite, progress), decide)


@dataclass(frozen=True)
class PermutedRows(Built):
    """Recipe that moves every row of a table (its dimension before the last) to another place."""

    source: str
    seed: int

    def build(self, read: "ReadTensor") -> "torch.Tensor":
        return read(self.source).index_select(-2, row_order(self.shape[-2], self.seed))


def row_order(rows: int, seed: int) -> "torch.Tensor":
    """Return the row moved to each position, `[rows]`, int64: one random cycle through two or more rows."""
    import torch

    cycle = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    order = torch.empty_like(cycle)
    order[cycle] = cycle.roll(1)
    return order


def _value_tables(model: BaseCheckpoint) -> Iterator[tuple[str, str, DeclaredTensor]]:
    memories = model.layout.memories
    for entry in memories.entries:
        within = f"{ATTACHED}.{entry.name}" if entry.is_attached else INSERTED
        owners = [
            (model.new_name(layer, within), tensors_in_layer(entry, layer, memories.sizes)) for layer in entry.layers
        ]
        shared = f"{model.prefix}{TABLES}.{entry.name}"
        tables = enumerate(entry.options.tables(memories.sizes, entry.layers))
        owners += [(f"{shared}.{number}", table.tensors) for number, table in tables]
        for owner, tensors in owners:
            for name, tensor in tensors.items():
                if tensor.role == "value":
                    yield f"{owner}.{name}", entry.name or entry.options.type, tensor


def files_without_banks(folder: Path) -> list[Path]:
    """Return the files of a checkpoint to copy as they are: without banks, states to resume from, and code."""
    weights = indexed_weights(folder)
    kinds = (WEIGHTS, CONFIG, RECORD, CARD)
    own = [path for path in folder.iterdir() if path.name in weights or is_of(path.name, *kinds)]
    return sorted({*own, *travelling_files(folder)})


@contextlib.contextmanager
def copied_for_edit(model: BaseCheckpoint, request: EditRequest) -> Iterator[Path]:
    """Yield the output of an edit of banks, with all other files, and the card without results."""
    source = model.folder
    files = files_without_banks(model.folder)
    folder = CheckpointFolder(request.required_output(), source, request.overwrite)
    folder.check_space(
        sum(path.stat().st_size for path in files) + total_bank_bytes(source, banks_of(model.layout.memories))
    )
    with folder.writing() as partial:
        for path in files:
            target = partial / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        _write_code(model, partial)
        remove_results(partial)
        yield partial


def remove_results(folder: Path) -> None:
    """Remove results measured before the edit from the card in a folder."""
    text = read_card(folder) or ""
    if (kept := without_results(text, "the edit")) != text:
        write_card(folder, kept)


def _write_siblings(
    model: BaseCheckpoint, partial: Path, edit: dict[str, Any], options: Mapping[str, Any], progress: Progress
) -> None:
    config = model.whole_config(_edited_config(model.config, edit, options))
    copy_travelling_files(model.folder, partial, progress)
    write_config(partial, config)
    record = read_record(model.folder)
    card = read_card(model.folder)
    if record is not None:
        unknown = {"identity": {"checked": None, "max_abs_diff": None}, "promises_identity": False}
        write_record(partial, {**record, EDITS_KEY: [*(record.get(EDITS_KEY) or []), edit], **unknown})
    if card is not None:
        write_card(partial, _edited_card(without_results(card, "the edit"), edit))
    _write_code(model, partial)


def _write_code(model: BaseCheckpoint, partial: Path) -> None:
    """Write the code that a checkpoint carries; of the Hub, code is not downloaded."""
    if "auto_map" in read_config(model.folder) or any((model.folder / name).is_file() for name in CODE):
        write_code_of(partial)


def _edited_config(config: Config, edit: dict[str, Any], options: Mapping[str, Any]) -> Config:
    config = copy.deepcopy(config)
    entries = config.get("memory") or []
    memories = [(_name_in(entry), entry) for entry in entries]
    of_base = [name for name in edit["memories"] if name in dict(memories)]
    for name, entry in memories:
        entry.update(options.get(name, {}))
    record = record_of(config) if of_base and has_record(config) else None
    if record is not None:
        edits = (*record.edits, {**edit, "memories": of_base})
        base_config = _edited_config(dict(record.base_config), edit, options)
        config[RECORD_KEY] = dataclasses.replace(record, edits=edits, base_config=base_config).to_dict()
    return config


def _name_in(entry: Mapping[str, Any]) -> str:
    kind = memory_type(entry["type"])
    is_inserted = entry.get("site", kind.sites[0]) == "inserted"
    usual = kind.type if is_inserted else kind.default_name
    return entry.get("name") or usual


def _edited_card(card: str, edit: dict[str, Any]) -> str:
    line = f"- {describe_edit(edit)} (midus_hf {edit['version']})\n"
    if _HEADING in card:
        return f"{card.rstrip()}\n{line}"
    heading = "The text and the numbers above describe the model after its upscaling. Since then:"
    return f"{card.rstrip()}\n\n{_HEADING}\n\n{heading}\n\n{line}"


def describe_edit(edit: Mapping[str, Any]) -> str:
    """Return the record of an edit in words: `zero of chapters, chapters 3,7-9`."""
    details = [f", {key} {value}" for key, value in edit.items() if key not in ("command", "memories", "version")]
    return f"{edit['command']} of {', '.join(edit['memories'])}{''.join(details)}"

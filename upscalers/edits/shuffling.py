"""The null control `shuffled-addresses`: a trained checkpoint with its rows of values in another order."""

import copy
import importlib.metadata
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midus_hf.config.controls import num_value_rows
from midus_hf.config.memory_entries import ATTACHED, INSERTED, TABLES
from midus_hf.files.ownership import CONFIG_KEY, has_config_entry
from upscalers.architecture.family import Config
from upscalers.checkpoint.base_model import BaseModel, open_base, read_config
from upscalers.checkpoint.safetensors_format import StoredTensor
from upscalers.checkpoint.source import resolve_source
from upscalers.record.provenance import SHUFFLES_KEY, read_config_entry, read_plan
from upscalers.request.errors import RequestError
from upscalers.request.options import check_seed
from upscalers.request.progress import Progress
from upscalers.runs.edited_checkpoint import write_edited
from upscalers.runs.output_folder import OutputFolder
from upscalers.tensors.recipes import Recipe, tensor_seed
from upscalers.tensors.writer import OutputTensor

if TYPE_CHECKING:
    import torch

    from upscalers.tensors.recipes import ReadTensor

_CHUNK_BYTES = 1 << 22
_HEADING = "## Shuffled rows of values"

# Record of one shuffle: `{"seed", "version", "memories", "same_function"}`.
Shuffle = dict[str, Any]


def shuffle(
    model: str | Path, output: str | Path, seed: int = 0, overwrite: bool = False, progress: Progress | None = None
) -> dict[str, Any]:
    """Permute the rows of all tables of values, so that a selected slot yields the value of another slot.

    All tables of one memory in one layer, or in one table that layers share, get the same order if they have the same
    number of rows, so that a slot's pre-value stays with its value. No row stays where it was. One table is in memory
    at a time.

    Args:
        model: A checkpoint with memory, trained or not: a folder or a hub id.
        output: The folder to make.
        seed: Seed of the orders, from 0 to 2^63 - 1. Default: 0.
        overwrite: Whether to replace an existing checkpoint, under the conditions of `upscale`. Default: False.
        progress: Display that shows every step. Default: none.

    Returns:
        `{"model", "output", "seed", "memories", "same_function", "tables", "bytes_written", "seconds"}`. `memories`
        has the names of the shuffled memories; an inserted memory is named by its type. `same_function` is whether
        all their values are zero, so that the model computes the same as before. `tables` is the number of tables that
        were shuffled.

    Raises:
        RequestError: If the seed is out of range, the model was not made by `upscale` or has no rows of values, or the
            output cannot be made.
    """
    check_seed(seed)
    started = time.perf_counter()
    progress = progress or Progress()
    with resolve_source(str(model)) as source:
        entry = read_config_entry(read_config(source.folder), source.folder)
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
        shuffled: Shuffle = {
            "seed": seed,
            "version": importlib.metadata.version("midus-hf"),
            "memories": list(dict.fromkeys(tables.values())),
            "same_function": not any(_holds_anything(opened.tensors[name]) for name in tables),
        }
        bytes_written = write_edited(
            opened,
            OutputFolder(output, source.folder, overwrite),
            {name: [_permuted(opened, name, seed)] for name in tables},
            _shuffled_config(opened.config, shuffled),
            lambda record: _shuffled_record(record, shuffled),
            lambda card: _shuffled_card(card, shuffled),
            progress,
        )
    return {
        "model": str(model),
        "output": str(output),
        **{key: value for key, value in shuffled.items() if key != "version"},
        "tables": len(tables),
        "bytes_written": bytes_written,
        "seconds": time.perf_counter() - started,
    }


def _tables(model: BaseModel) -> Iterator[tuple[str, str]]:
    """Yield the full name of each table of values with several rows, and the name of its memory."""
    for entry in model.memories.entries:
        memory = entry.name or entry.type
        within = f"{ATTACHED}.{entry.name}" if entry.is_attached else INSERTED
        owners = [
            (model.new_name(layer, within), entry.tensors_at(layer, model.memories.sizes)) for layer in entry.layers
        ]
        if entry.is_attached:
            shared = f"{model.prefix}{TABLES}.{entry.name}"
            tables = enumerate(model.memories.tables(entry.name))
            owners += [(f"{shared}.{number}", of_table.tensors) for number, of_table in tables]
        for owner, tensors in owners:
            for name, tensor in tensors.items():
                if num_value_rows(tensor) > 1:
                    yield f"{owner}.{name}", memory


def _permuted(model: BaseModel, name: str, seed: int) -> OutputTensor:
    stored, owner = model.tensors[name], name.removeprefix(model.prefix).rpartition(".")[0]
    return OutputTensor(name, PermutedRows(stored.shape, name, tensor_seed(seed, owner)), stored.dtype)


def _holds_anything(tensor: StoredTensor) -> bool:
    """Return whether a stored tensor has a byte that is not zero."""
    assert tensor.file is not None
    with tensor.file.open("rb", buffering=0) as file:
        file.seek(tensor.start)
        left = tensor.num_bytes
        while left:
            chunk = file.read(min(left, _CHUNK_BYTES))
            if chunk.strip(b"\0"):
                return True
            assert chunk, f"{tensor.file} ended {left} bytes early"
            left -= len(chunk)
    return False


def _shuffled_config(config: Config, shuffle: Shuffle) -> Config:
    """Return the config with the shuffle recorded, and in its base's config that of the base's own memories."""
    config = copy.deepcopy(config)
    names = {entry.get("name", entry["type"]) for entry in config.get("memory") or []}
    own = [name for name in shuffle["memories"] if name in names]
    if has_config_entry(config) and own:
        entry = config[CONFIG_KEY]
        entry[SHUFFLES_KEY] = [*(entry.get(SHUFFLES_KEY) or []), {**shuffle, "memories": own}]
        entry["base_config"] = _shuffled_config(entry["base_config"], shuffle)
    return config


def _shuffled_record(record: dict[str, Any], shuffle: Shuffle) -> dict[str, Any]:
    """Return the content of `upscale.json` with the shuffle recorded, without the promise unless all values are zero."""
    changed = {**record, SHUFFLES_KEY: [*(record.get(SHUFFLES_KEY) or []), shuffle]}
    if not shuffle["same_function"]:
        changed |= {"identity": {"checked": None, "max_abs_diff": None}, "promises_identity": False}
    return changed


def _shuffled_card(card: str, shuffle: Shuffle) -> str:
    """Return a model card with a line about the shuffle at its end."""
    memories = ", ".join(shuffle["memories"])
    end = (
        "Every value is zero, so that the model computes what it did."
        if shuffle["same_function"]
        else "It does not compute what it did, and starts from another function than its base."
    )
    line = (
        f"- `upscale shuffle --seed {shuffle['seed']}` of midus_hf {shuffle['version']}: the rows of values of {memories} were "
        f"permuted: a null control, in which addresses have no meaning. {end}\n"
    )
    if _HEADING in card:
        return f"{card.rstrip()}\n{line}"
    return f"{card.rstrip()}\n\n{_HEADING}\n\n{line}"


@dataclass(frozen=True)
class PermutedRows(Recipe):
    """Recipe that reorders the rows of a table, its dimension before the last, so that no row stays where it was.

    Args:
        source: Full name of the table, which has at least two rows. If the table has more than two dimensions, the
            rows have the same order at every index of the dimensions in front.
        seed: Seed of the order. The same seed and number of rows give the same order.
    """

    source: str
    seed: int

    def build(self, read: "ReadTensor") -> "torch.Tensor":
        return read(self.source).index_select(-2, row_order(self.shape[-2], self.seed))


def row_order(rows: int, seed: int) -> "torch.Tensor":
    """Return the row that comes to each position, `[rows]`, int64: one random cycle through all rows.

    Args:
        rows: Number of rows, at least two.
        seed: Seed of the cycle.
    """
    import torch

    cycle = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    order = torch.empty_like(cycle)
    order[cycle] = cycle.roll(1)
    return order

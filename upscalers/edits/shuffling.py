"""The null control `shuffled-addresses`: a trained checkpoint with its rows of values in another order."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midus_hf.config.errors import RequestError
from midus_hf.memories.controls import num_value_rows
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint
from upscalers.edits.checkpoint_edit import EditDetails, EditRequest, edit_checkpoint, value_tables
from upscalers.request.options import check_seed
from upscalers.request.progress import Progress
from upscalers.tensors.recipes import Recipe, tensor_seed
from upscalers.tensors.writer import OutputTensor

if TYPE_CHECKING:
    import torch

    from upscalers.tensors.recipes import ReadTensor


def shuffle(
    model: str | Path, output: str | Path, seed: int = 0, overwrite: bool = False, progress: Progress | None = None
) -> dict[str, Any]:
    """Permute the rows of all tables of values, so that a selected slot yields the value of another slot.

    All tables of one memory in one layer, or in one table that layers share, get the same order if they have the same
    number of rows, so that a slot's pre-value stays with its value. Every row is moved. One table is in memory
    at a time.

    Args:
        model: A checkpoint with memory, trained or not: a folder or a hub id.
        output: The folder to make.
        seed: Seed of the orders, from 0 to 2^63 - 1. Default: 0.
        overwrite: Whether to replace an existing checkpoint, under the conditions of `upscale`. Default: False.
        progress: Display that shows every step. Default: none.

    Returns:
        As from `edit_checkpoint`, with `seed`, and with the number of shuffled tables as `tables`.

    Raises:
        RequestError: If the seed is out of range, the model has no rows of values, or the output cannot be made.
    """
    check_seed(seed)

    def decide(opened: BaseCheckpoint) -> EditDetails:
        tables = {name: memory for name, memory, tensor in value_tables(opened) if num_value_rows(tensor) > 1}
        if not tables:
            raise RequestError(
                f"{opened.folder} has no table of values with a row for each of several slots; expected a model with a memory that "
                "retrieves rows, such as one of the method midus-hml."
            )
        tensors = {name: [_permuted(opened, name, seed)] for name in tables}
        return EditDetails(list(dict.fromkeys(tables.values())), tensors, {"seed": seed, "tables": len(tables)})

    return edit_checkpoint("shuffle", EditRequest(model, output, None, overwrite, progress), decide)


def _permuted(model: BaseCheckpoint, name: str, seed: int) -> OutputTensor:
    stored, owner = model.tensors[name], name.removeprefix(model.prefix).rpartition(".")[0]
    return OutputTensor(name, PermutedRows(stored.shape, name, tensor_seed(seed, owner)), stored.dtype)


@dataclass(frozen=True)
class PermutedRows(Recipe):
    """Recipe that reorders the rows of a table, its dimension before the last, so that every row is moved."""

    source: str
    seed: int

    def build(self, read: "ReadTensor") -> "torch.Tensor":
        return read(self.source).index_select(-2, row_order(self.shape[-2], self.seed))


def row_order(rows: int, seed: int) -> "torch.Tensor":
    """Return the row that is moved to each position, `[rows]`, int64: one random cycle through all rows, two or more."""
    import torch

    cycle = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    order = torch.empty_like(cycle)
    order[cycle] = cycle.roll(1)
    return order

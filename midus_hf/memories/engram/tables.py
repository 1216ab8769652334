"""The tables of known n-grams in a model: found by name, the only ones that train, and without n-grams that are taken out."""

from collections.abc import Mapping
from typing import Any

import torch

from midus_hf.config.errors import RequestError
from midus_hf.memories.engram.known import TAKEN_OUT, NgramTable
from midus_hf.memories.engram.options import NgramOptions
from midus_hf.memories.entries import ATTACHED, TABLES, Memories
from midus_hf.memories.hosting.parts import decoder_of


def exact_tables(memories: Memories, tensors: Mapping[str, torch.Tensor]) -> list[NgramTable]:
    """Return the tables of all memories that read rows by known n-grams, from tensors by their names in the model."""
    tables = []
    for name, entry in memories.attached.items():
        options = entry.options
        if isinstance(options, NgramOptions) and options.table == "exact" and options.addressing == "content":
            own = {each.rpartition(".")[2]: tensor for each, tensor in tensors.items() if f"{TABLES}.{name}." in each}
            if "ngrams" not in own:
                raise RequestError(f"the weights lack the table of memory {name!r}; expected a whole checkpoint.")
            tables.append(NgramTable(name, options, own["ngrams"], own.get("token_numbers")))
    return tables


def named_tables(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.named_buffers() if f"{TABLES}." in name}


def trained_tables(model: Any) -> list[NgramTable]:
    """Return the tables of the trained memories, or refuse a model in which anything but exact tables is trained."""
    memories: Memories | None = model.config.memories() if hasattr(model.config, "memories") else None
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    tables = [] if memories is None else exact_tables(memories, named_tables(model))
    tables = [table for table in tables if any(_is_of(each, table.memory) for each in trained)]
    others = [each for each in trained if not any(_is_of(each, table.memory) for table in tables)]
    if tables and not others:
        return tables
    what, reason = others[0] if others else "no memory", "which every text reads"
    for entry in () if memories is None else memories.entries:
        options = entry.options
        if not entry.is_attached or any(_is_of(each, entry.name) for each in others):
            what = f"{entry.name if entry.is_attached else 'an inserted layer'} ({options.type})"
            reason = "which chooses rows by hidden states, so that a few texts read nearly all of them"
            if isinstance(options, NgramOptions):
                reason = (
                    f"which has table {options.table!r} and addressing {options.addressing!r}, where texts share rows"
                )
    raise RequestError(
        f"protect is given, and {what} trains, {reason}; expected only memories of known n-grams. Set trainable: new, and use a "
        "model that was upscaled with --method engram --set table=exact."
    )


def take_out(model: Any, table: NgramTable, taken: torch.Tensor) -> int:
    """Remove n-grams from a memory's table, with their rows in all layers, and return how many are left."""
    stays = (table.ngrams < TAKEN_OUT) & ~torch.isin(table.ngrams, taken)
    left = int(stays.sum())
    with torch.no_grad():
        kept = table.ngrams[stays]
        table.ngrams.fill_(TAKEN_OUT)
        table.ngrams[:left] = kept
        for layer in decoder_of(model).layers:
            memory = getattr(layer, "memories", {})
            if table.memory in memory and table.options.rows != 1:
                values = memory[table.memory].value_table
                rows = values[1:][stays.to(values.device)].clone()
                values.zero_()
                values[1 : 1 + left] = rows
    return left


def _is_of(name: str, memory: str) -> bool:
    """Return whether a tensor's name is that of an attached memory or of its tables."""
    return f".{ATTACHED}.{memory}." in name or f"{TABLES}.{memory}." in name

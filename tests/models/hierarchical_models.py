"""Models whose memories fetch blocks, built in memory from a tiny base, and bases that state what they compute."""

import copy
from typing import Any

import torch
from models.hosting import host_of
from tiny import tiny_model

from midus_hf.files.checkpoint_files import BANKS_FOLDER
from midus_hf.memories.hierarchical.bank import FetchedBatch, MemoryBank, create_bank
from midus_hf.memories.hierarchical.options import block_layouts
from scripts.anatomy.statement import state

KINDS = ("hier-ffn", "hier-lora-qk", "hier-lora-vo", "hier-lora-ffn", "hier-kv")
# Paths of two rows in the tree of these models, three children a node; the second reads the generic memory.
IDS = torch.tensor([[1, 4, 13], [-1, -1, -1]])

OTHER_IDS = torch.tensor([[1, 3, 10], [1, 3, 9]])
# Settings of a generation without chance.
FOUR_TOKENS = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}


def entry_of(kind, **changes):
    return {"type": kind, "layers": [0, 2, 3], "sizes": [3, 0, 2], "branching": 3, **changes}


def hierarchical_model(family, kind, folder, dtype=torch.float64, *, acting=True, base=None, **options) -> Any:
    """A tiny model with the banks of one kind of memory, or of several, whose every block was written if they act, in eval mode."""
    kinds = (kind,) if isinstance(kind, str) else kind
    model = host_of(tiny_model(family, dtype, **(base or {})), *(entry_of(name, **options) for name in kinds))
    for name, layout in block_layouts(model.config.memories()).items():
        path = folder / BANKS_FOLDER / name
        create_bank(path, layout, dtype, seed=3)
        if acting:
            bank = MemoryBank(path, layout)
            fill(bank)
    model.banks.open(folder)
    return model


def fill(bank, but=()):
    """Write every block but some, so that it acts."""
    generator, records = torch.Generator().manual_seed(8), {}
    for level in bank.layout.levels:
        for index in range(-1, bank.layout.blocks.nodes(level)):
            if (level, index) not in but:
                record = 0.3 * torch.randn(bank.layout.record_numel(level), generator=generator)
                records[level, index] = record.clone
    bank.save(bank.folder, records)


def _one_by_row(batch):
    """Return the blocks with a record of its own for each row."""
    records = {level: record[batch.blocks[level]] for level, record in batch.records.items()}
    return FetchedBatch(batch.layout, records, dict.fromkeys(records, torch.arange(batch.num_rows)))


def stated_base(native, model, ids):
    """Return a copy of the base that computes what memories make of it for rows with these paths, as proofs state it."""
    stated = copy.deepcopy(native)
    blocks = {name: _one_by_row(batch) for name, batch in model.fetch_memory(ids).items()}
    for name, entry in model.config.memories().attached.items():
        state(stated, model, entry, blocks[name])
    return stated

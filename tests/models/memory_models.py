"""Models with memories attached, of a tiny base, and bases that state what they compute."""

import copy
from typing import Any

import torch
from models.hosting import host_of
from tiny import NUM_LAYERS, tiny_model

from midus_hf.config.declared_tensors import ZEROS
from midus_hf.files.checkpoint_files import BANKS_FOLDER
from midus_hf.memories.hierarchical.bank import FetchedBatch, MemoryBank, create_bank
from midus_hf.memories.hierarchical.options import block_layouts
from midus_hf.memories.moc.layer import MocMemory
from midus_hf.memories.moda.layer import ModaMemory
from midus_hf.memories.module import MemoryTables
from scripts.anatomy.statement import state

# How far tensors of chapters are spread where they act: hidden states of a tiny model are small, and routers shall choose clearly.
_SPREAD = {"router_weight": 8.0, "router_bias": 0.5, "norm_weight": 1.0}


def chapter_entry(name: str = "chapters", layers: tuple[int, ...] = (1, 3), **options: Any) -> dict[str, Any]:
    small = {"memory_tokens": 24, "chapters": 12, "k": 2, "chunk_size": 3}
    return {"type": "moc", "name": name, "site": "behind-attention", "layers": list(layers), **small, **options}


def chapter_model(family="llama", *, acting=True, dtype=torch.float64, memory=None, config=None, **options) -> Any:
    """A tiny model with one memory or these entries, in eval mode; `config` are changes of the base's."""
    model = host_of(tiny_model(family, dtype, **(config or {})), *(memory or [chapter_entry(**options)]), seed=7)
    if acting:
        act_by_chapters(model)
    return model


@torch.no_grad()
def act_by_chapters(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    for module in model.modules():
        if isinstance(module, MocMemory | MemoryTables):
            for name, parameter in module.named_parameters():
                parameter.copy_(_SPREAD.get(name, 0.3) * torch.randn(parameter.shape, generator=generator))


def chapters_of(model: torch.nn.Module) -> list[MocMemory]:
    return [module for module in model.modules() if isinstance(module, MocMemory)]


# Models whose heads read the depth.
DEPTHS: dict[str, dict[str, Any]] = {
    "default": {}, "reused": {"joining": "interpolated", "attention_slots": "reused"},
    "joint": {"joining": "joint", "attention_slots": "reused"},
    "attention": {"joining": "interpolated", "attention_slots": "reused", "ffn_slots": False}, "bias": {"bias": True},
    "projected": {"attention_slots": "projected", "bias": True}, "added to reused": {"attention_slots": "reused"},
    "some": {"layers": [0, 2, 3]},
}  # fmt: skip


def depth_model(
    family: str = "llama",
    kind: str = "default",
    dtype: torch.dtype = torch.float64,
    *,
    acting: bool = True,
    num_hidden_layers: int = NUM_LAYERS,
    base: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A tiny model whose heads read the depth, in eval mode; with zeros where it does not act."""
    entry = {"type": "moda", "layers": list(range(num_hidden_layers)), **DEPTHS[kind], **options}
    model = host_of(tiny_model(family, dtype, num_hidden_layers=num_hidden_layers, **(base or {})), entry)
    for memory in model.modules():
        for name, value in memory.named_parameters() if isinstance(memory, ModaMemory) else ():
            with torch.no_grad():
                if not acting and memory.declared[name].initial == ZEROS:
                    value.zero_()
                elif name == "depth_gate":
                    value.copy_(0.2 + 0.7 * torch.rand_like(value))
                else:
                    value.copy_(0.4 * torch.randn_like(value))
    return model


ULTRAMEMS = {
    "own": {}, "heads": {"heads": 2}, "ring": {"share": "ring:2"}, "skip": {"site": "skip", "layers": [1, 2], "into": [2, 3]},
    "shared skip": {"site": "skip", "layers": [1, 2], "into": [1, 2], "share": "ring:2"},
}  # fmt: skip


def ultramem_model(family="llama", kind="own", dtype=torch.float64, num_hidden_layers=NUM_LAYERS, **options):
    entry = {"type": "ultramem-v2", "layers": [1, 3], "n": 8, "k": 3, "zero": "none", **ULTRAMEMS[kind], **options}
    model = host_of(tiny_model(family, dtype, num_hidden_layers=num_hidden_layers), entry)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("value_table"):
                value.mul_(4)  # so that it shows
    return model


# Models whose memories fetch blocks.
FETCHING = ("hier-ffn", "hier-lora-qk", "hier-lora-vo", "hier-lora-ffn", "hier-kv")
# Paths of two rows in the tree of these models, three children a node; the second reads the generic memory.
IDS = torch.tensor([[1, 4, 13], [-1, -1, -1]])
OTHER_IDS = torch.tensor([[1, 3, 10], [1, 3, 9]])


def fetching_entry(kind, **changes):
    return {"type": kind, "layers": [0, 2, 3], "sizes": [3, 0, 2], "branching": 3, **changes}


def hierarchical_model(family, kind, folder, dtype=torch.float64, *, acting=True, base=None, **options) -> Any:
    """A tiny model with banks of one or several kinds, whose every block was written if they act."""
    kinds = (kind,) if isinstance(kind, str) else kind
    model = host_of(tiny_model(family, dtype, **(base or {})), *(fetching_entry(name, **options) for name in kinds))
    for name, layout in block_layouts(model.config.memories()).items():
        path = folder / BANKS_FOLDER / name
        create_bank(path, layout, dtype, seed=3)
        if acting:
            fill(MemoryBank(path, layout))
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


def stated_base(native, model, ids):
    """Return a copy of the base that computes what memories make of it for rows with these paths."""
    stated, blocks = copy.deepcopy(native), {}
    for name, batch in model.fetch_memory(ids).items():  # with a record of its own for each row
        records = {level: record[batch.blocks[level]] for level, record in batch.records.items()}
        blocks[name] = FetchedBatch(batch.layout, records, dict.fromkeys(records, torch.arange(batch.num_rows)))
    for name, entry in model.config.memories().attached.items():
        state(stated, model, entry, blocks[name])
    return stated

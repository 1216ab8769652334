"""Models with packs, built in memory from a tiny base: random keys and values at names of one and two tokens."""

from typing import Any

import torch
from models.hosting import host_of
from tiny import tiny_model

from midus_hf.config.fetched_blocks import BANKS_FOLDER
from midus_hf.memories.packs.bank import PackBank
from midus_hf.memories.packs.options import pack_layouts
from midus_hf.memories.packs.writing import name_table, write_packs

ENTRIES = 5
# Of random tokens below 128, every third is a name.
SPELLINGS = {(token,): token % ENTRIES + 1 for token in range(0, 128, 3)} | {(7, 8): 2, (8, 7, 10): 4}


def pack_model(
    family: str, folder: Any, dtype: torch.dtype, *, acting: bool = True, layers: Any = None, **sizes: Any
) -> Any:
    """A tiny model in eval mode with a bank in `folder`, which is open if the memory acts."""
    native = tiny_model(family, dtype, **sizes)
    layers = list(range(native.config.num_hidden_layers)) if layers is None else layers
    model = host_of(native, {"type": "packs", "layers": layers})
    if acting:
        layout = pack_layouts(model.config.memories())["packs"]
        path, generator = folder / BANKS_FOLDER / "packs", torch.Generator().manual_seed(5)
        lengths = range(2, 2 + ENTRIES)
        packs = [torch.randn(length, *layout.token_shape, generator=generator).to(dtype) for length in lengths]
        titles = [[f"entry {number}"] for number in lengths]
        write_packs(path, layout, titles, name_table(SPELLINGS, 128), lengths, packs, dtype, 2000, {"tokenizer": None})
        model.model.services["packs"].banks = {"packs": PackBank(path, layout)}
    return model

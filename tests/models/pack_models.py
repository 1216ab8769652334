"""Models with packs, built in memory from a tiny base: random keys and values at names of one and two tokens."""

from typing import Any

import torch
from models.hosting import host_of
from tiny import tiny_model
from transformers import AutoModelForCausalLM

from midus_hf.config.fetched_blocks import BANKS_FOLDER
from midus_hf.memories.packs.bank import PackBank
from midus_hf.memories.packs.options import pack_layouts
from midus_hf.memories.packs.writing import name_table, write_packs
from upscalers.methods.packs import read_packs, rotation_angles
from upscalers.request.progress import Progress

ENTRIES = 5
# Of random tokens below 128, every third is a name.
SPELLINGS = {(token,): token % ENTRIES + 1 for token in range(0, 128, 3)} | {(7, 8): 2, (8, 7, 10): 4}


def pack_model(
    family: str, folder: Any, dtype: torch.dtype, *, acting: bool = True, layers: Any = None, **sizes: Any
) -> Any:
    """A tiny model in eval mode with a bank of random packs in `folder`, which is open if the memory acts."""
    native = tiny_model(family, dtype, **sizes)
    layers = list(range(native.config.num_hidden_layers)) if layers is None else layers
    model = host_of(native, {"type": "packs", "layers": layers})
    if acting:
        layout = pack_layouts(model.config.memories())["packs"]
        generator = torch.Generator().manual_seed(5)
        lengths = range(2, 2 + ENTRIES)
        packs = [torch.randn(length, *layout.token_shape, generator=generator).to(dtype) for length in lengths]
        open_bank(model, folder, packs, SPELLINGS)
    return model


def model_of_texts(
    family: str, folder: Any, dtype: torch.dtype, texts: dict[int, list[int]], distance: int = 0
) -> tuple[Any, Any]:
    """A tiny model and its host with the packs of texts, token ids by the token that is their name, in eval mode."""
    tiny_model(family, dtype).save_pretrained(folder / "base")
    native = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=dtype).eval()
    layers = list(range(native.config.num_hidden_layers))
    host = host_of(native, {"type": "packs", "layers": layers, "score_bias": 0.0, "distance": distance})
    host.save_pretrained(folder / "host")
    open_bank(host, folder / "host", [], {})
    model = AutoModelForCausalLM.from_pretrained(folder / "host", dtype=dtype).eval()
    packs = list(read_packs(model, layers, list(texts.values()), Progress()))
    open_bank(model, folder, packs, {(name,): number for number, name in enumerate(texts, 1)})
    return native, model


def open_bank(model: Any, folder: Any, packs: list[torch.Tensor], spellings: dict[tuple[int, ...], int]) -> None:
    """Write a bank of packs, and open it for a model."""
    model.model.services["packs"].banks = {}
    path, layout = folder / BANKS_FOLDER / "packs", pack_layouts(model.config.memories())["packs"]
    titles, lengths = [[f"entry {number}"] for number in range(len(packs))], [len(pack) for pack in packs]
    angles = rotation_angles(model, layout.layers)
    write_packs(path, layout, titles, name_table(spellings, 128), angles, lengths, packs, model.dtype, 2000)
    model.model.services["packs"].banks = {"packs": PackBank(path, layout)}

"""Banks of blocks beside a checkpoint: one folder per memory, holding the blocks that texts fetch."""

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from midus_hf.files.checkpoint_files import BANK_DESCRIPTION, BANKS, BANKS_FOLDER, GLOSSARY_FILE, is_of
from midus_hf.memories.entries import Memories
from midus_hf.memories.hierarchical.blocks import BankLayout
from midus_hf.memories.packs.options import PacksOptions
from upscalers.request.errors import RequestError

if TYPE_CHECKING:
    from midus_hf.topics.tree import ClusterTree


def bank_files(folder: Path) -> set[Path]:
    """Return the files of a checkpoint's banks."""
    candidates = (folder / BANKS_FOLDER).glob("*/*")
    return {path for path in candidates if path.is_file() and is_of(path.relative_to(folder), BANKS)}


def create_banks(folder: Path, layouts: Mapping[str, BankLayout], dtype: str, seed: int) -> None:
    """Create banks whose blocks were never written. Each memory derives a seed of its own from `seed`, or two would learn alike."""
    import torch

    from midus_hf.memories.hierarchical.bank.memory_bank import create_bank

    for name, layout in layouts.items():
        own_seed = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4], "little")
        create_bank(folder / BANKS_FOLDER / name, layout, getattr(torch, dtype), own_seed)


def carry_banks(
    source: Path,
    folder: Path,
    layouts: Mapping[str, BankLayout],
    deleted: Mapping[str, Collection[tuple[int, int]]] | None = None,
    tree: "ClusterTree | None" = None,
    tree_folder: Path | None = None,
) -> None:
    """Copy banks of blocks from the checkpoint `source` to `folder`; blocks that were never written take no room there."""
    if not layouts:
        return
    from midus_hf.memories.hierarchical.bank.level_file import BankError
    from midus_hf.memories.hierarchical.bank.memory_bank import MemoryBank

    for name, layout in layouts.items():
        try:
            bank = MemoryBank(source / BANKS_FOLDER / name, layout)
            if tree is not None:
                bank.grow(None, tree.fingerprint, tree.grown_from)
            target = folder / BANKS_FOLDER / name
            bank.save(target, tree_folder=tree_folder, deleted=(deleted or {}).get(name, ()))
        except BankError as error:
            raise RequestError(str(error)) from None


def has_glossary(memories: Memories) -> bool:
    """Return whether a model reads names and texts that lie beside its weights."""
    return any(isinstance(entry.options, PacksOptions) for entry in memories.attached.values())


def carry_glossary(source: Path, folder: Path, memories: Memories) -> None:
    """Copy the glossary that a model with these memories reads to a checkpoint's folder; one without entries where there is none."""
    if has_glossary(memories):
        own = source / GLOSSARY_FILE
        (folder / GLOSSARY_FILE).write_bytes(own.read_bytes() if own.is_file() else b"")


def tie_banks(folder: Path, layouts: Mapping[str, BankLayout]) -> None:
    """Let the descriptions of banks in a checkpoint's folder name the layers and the base of the model beside them."""
    if not layouts:
        return
    from midus_hf.memories.hierarchical.bank.memory_bank import write_description

    for name, layout in layouts.items():
        bank = folder / BANKS_FOLDER / name
        description = json.loads((bank / BANK_DESCRIPTION).read_text(encoding="utf-8"))
        write_description(bank, {**description, "layout": layout.to_dict()})


def bytes_of_banks(folder: Path, names: Collection[str]) -> int:
    """Return the bytes of disk that the banks of the memories in `names` take."""
    return sum(path.stat().st_blocks * 512 for path in bank_files(folder) if path.parent.name in names)

"""Banks beside a checkpoint: blocks that texts fetch, a folder per memory."""

import contextlib
import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path

from midus_hf.config.fetched_blocks import BANK_DESCRIPTION, BANKS_FOLDER, BankLayout
from midus_hf.files.checkpoint_files import BANKS, is_of
from upscalers.request.errors import RequestError


def bank_files(folder: Path) -> set[Path]:
    """The files of banks that a checkpoint has."""
    found = (folder / BANKS_FOLDER).glob("*/*")
    return {path for path in found if path.is_file() and is_of(path.relative_to(folder), BANKS)}


def create_banks(folder: Path, layouts: Mapping[str, BankLayout], dtype: str, seed: int) -> None:
    """Make banks whose blocks were never written, which take four bytes of the disk for each block.

    Args:
        folder: Of the checkpoint.
        layouts: By the name of the memory.
        dtype: torch's name of the dtype that blocks are stored in.
        seed: What blocks start as; those of each memory as others, since two of one type that start alike would learn alike.
    """
    import torch

    from midus_hf.banks.memory_bank import create_bank

    for name, layout in layouts.items():
        create_bank(folder / BANKS_FOLDER / name, layout, getattr(torch, dtype), _seed_of(name, seed))


def _seed_of(name: str, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4], "little")


def carry_banks(
    source: Path,
    folder: Path,
    layouts: Mapping[str, BankLayout],
    deleted: Mapping[str, Collection[tuple[int, int]]] | None = None,
) -> None:
    """Copy banks from one checkpoint to another; what was never written takes no room there either.

    Args:
        source: Of the checkpoint that has them.
        folder: Of the other.
        layouts: By the name of the memory.
        deleted: Level and index of blocks that are not carried along, and are said to be deleted. Default: none.

    Raises:
        RequestError: If one is absent or not the model's, or a block is not what was written.
    """
    if not layouts:
        return
    from midus_hf.banks.level_file import BankError
    from midus_hf.banks.memory_bank import MemoryBank

    for name, layout in layouts.items():
        try:
            with contextlib.closing(MemoryBank(source / BANKS_FOLDER / name, layout)) as bank:
                bank.save(folder / BANKS_FOLDER / name, deleted=(deleted or {}).get(name, ()))
        except BankError as error:
            raise RequestError(str(error)) from None


def tie_banks(folder: Path, layouts: Mapping[str, BankLayout]) -> None:
    """Let the descriptions of banks name the layers and the base of the model that the banks lie beside now.

    Args:
        folder: Of the checkpoint.
        layouts: That its config implies, by the name of the memory.
    """
    if not layouts:
        return
    from midus_hf.banks.bank_description import write_description

    for name, layout in layouts.items():
        bank = folder / BANKS_FOLDER / name
        description = json.loads((bank / BANK_DESCRIPTION).read_text(encoding="utf-8"))
        write_description(bank, {**description, "layout": layout.to_dict()})


def bytes_of_banks(folder: Path, names: Collection[str]) -> int:
    """What banks of a checkpoint take of the disk, by the names of their memories."""
    return sum(path.stat().st_blocks * 512 for path in bank_files(folder) if path.parent.name in names)

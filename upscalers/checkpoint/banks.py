"""Banks of a checkpoint's memories: they are created and copied with the checkpoint, and name its model."""

from collections.abc import Mapping
from pathlib import Path

from midus_hf.memories.bank import Bank


def copy_banks(source: Path, folder: Path, banks: Mapping[str, Bank]) -> None:
    """Copy banks from the checkpoint `source` to another folder."""
    for bank in banks.values():
        bank.copy(source, folder)


def tie_banks(folder: Path, banks: Mapping[str, Bank]) -> None:
    """Write the layers and the base of the model into the banks in its checkpoint's folder."""
    for bank in banks.values():
        bank.tie(folder)


def bytes_of_banks(folder: Path, banks: Mapping[str, Bank]) -> int:
    """Return the bytes that banks take on disk."""
    return sum(bank.num_bytes(folder) for bank in banks.values())

"""Banks beside a checkpoint, of whichever memories: they are created, copied and tied with it."""

from collections.abc import Mapping
from pathlib import Path

from midus_hf.memories.bank import Bank
from upscalers.request.errors import refusing_requests


def copy_banks(source: Path, folder: Path, banks: Mapping[str, Bank]) -> None:
    """Copy banks from the checkpoint `source` to another folder, or raise `RequestError` about one that cannot be read."""
    with refusing_requests():
        for bank in banks.values():
            bank.copy(source, folder)


def tie_banks(folder: Path, banks: Mapping[str, Bank]) -> None:
    """Let banks in the folder of a checkpoint name the layers and the base of the model beside them."""
    for bank in banks.values():
        bank.tie(folder)


def bytes_of_banks(folder: Path, banks: Mapping[str, Bank]) -> int:
    """Return the bytes of disk that banks take."""
    return sum(bank.num_bytes(folder) for bank in banks.values())

"""Opening of a checkpoint's banks for reading and editing."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from midus_hf.config.fetched_blocks import BANKS_FOLDER, BankLayout
from upscalers.checkpoint.base_model import open_base
from upscalers.request.errors import RequestError

if TYPE_CHECKING:
    from midus_hf.banks.memory_bank import MemoryBank


def find_layout(folder: Path, memory: str | None) -> tuple[str, BankLayout]:
    """Return the name of a memory that fetches blocks, and the layout of its bank.

    Args:
        folder: Folder of the checkpoint.
        memory: Name of the memory; None for the only one.

    Raises:
        RequestError: If the model has no memory of this name, or several and `memory` is None.
    """
    banks = open_base(folder, needs_weights=False).memories.banks
    if not banks:
        raise RequestError(
            f"{folder} has no memory that fetches blocks; expected a checkpoint that upscale made with one."
        )
    if memory is None and len(banks) > 1:
        raise RequestError(f"{folder} has the memories {', '.join(banks)}; expected one of them. Pass --memory NAME.")
    name = next(iter(banks)) if memory is None else memory
    if name not in banks:
        raise RequestError(
            f"{folder} has no memory {name!r} that fetches blocks; expected one of: {', '.join(banks)}."
        )
    return name, banks[name]


@contextlib.contextmanager
def open_bank(folder: Path, name: str, layout: BankLayout, writable: bool = False) -> Iterator["MemoryBank"]:
    """Open the bank of a memory, and close the bank afterwards.

    Args:
        folder: Folder of the checkpoint.
        name: Name of the memory.
        layout: Layout of the bank.
        writable: Whether blocks can be written. Default: False.

    Raises:
        RequestError: If the bank is absent, damaged, or another model's.
    """
    from midus_hf.banks.level_file import BankError
    from midus_hf.banks.memory_bank import MemoryBank

    try:
        bank = MemoryBank(folder / BANKS_FOLDER / name, layout, writable=writable)
    except BankError as error:
        raise RequestError(str(error)) from None
    try:
        yield bank
    except BankError as error:
        raise RequestError(str(error)) from None
    finally:
        bank.close()

"""What tells the bank of one model from that of another, and who may write to it."""

import json
from pathlib import Path
from typing import Any

from midus_config.fetched_blocks import BANK_DESCRIPTION, BankLayout
from midus_config.locks import Lock, has_no_locks
from midus_config.whole_files import sync, whole_file
from midus_hf.banks.level_file import BankError

_FORMAT = 2


def describe(layout: BankLayout, seed: int) -> dict[str, Any]:
    """The description of a bank.

    Args:
        layout: Of the bank.
        seed: What blocks start as that were never written.
    """
    return {"format": _FORMAT, "layout": layout.to_dict(), "seed": seed}


def write_description(folder: Path, description: dict[str, Any]) -> None:
    """Write what tells the bank from others."""
    sync(folder)  # with it a bank is whole
    with whole_file(folder / BANK_DESCRIPTION) as partial:
        partial.write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def read_description(folder: Path, layout: BankLayout) -> dict[str, Any]:
    """Read it, and compare it with what the model's config implies.

    Raises:
        BankError: If there is none, or it is that of another model.
    """
    path = folder / BANK_DESCRIPTION
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BankError(
            f"there is no memory bank in {folder} ({error.strerror}: {BANK_DESCRIPTION}); expected one beside the model."
        ) from None
    except ValueError:
        raise BankError(f"{path} is no JSON; expected the description of a bank. Copy the bank again.") from None
    if not isinstance(description, dict) or description.get("format") != _FORMAT:
        raise BankError(f"{path} has another format than {_FORMAT}; expected a bank that this version reads.")
    difference = _difference(description.get("layout"), layout.to_dict())
    if difference:
        raise BankError(
            f"the memory bank in {folder} belongs to another model: {difference}. Put the model's own there."
        )
    if type(description.get("seed")) is not int:
        raise BankError(f"{path} has the seed {description.get('seed')!r}; expected an integer. Copy the bank again.")
    return description


def _difference(found: Any, expected: dict[str, Any]) -> str | None:
    """The first thing that two layouts disagree in; None if they agree."""
    if not isinstance(found, dict):
        return f"its layout is {found!r}"
    for key, value in expected.items():
        if found.get(key) != value:
            return f"its {key} is {found.get(key)!r}; expected {value!r}"
    return None


def lock(folder: Path) -> Lock | None:
    """Hold the bank for writing; None where its file system has no locks: there nobody is refused.

    Raises:
        BankError: If somebody else does.
    """
    try:
        return Lock(folder / BANK_DESCRIPTION)
    except BlockingIOError:
        raise BankError(f"the memory bank in {folder} is being written by another run. Wait for it.") from None
    except OSError as error:
        if has_no_locks(error):
            return None
        raise

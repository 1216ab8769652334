"""What tells the bank of one model from that of another, and who may write to it."""

import json
from pathlib import Path
from typing import Any

from midus_hf.banks.level_file import BankError
from midus_hf.config.fetched_blocks import BANK_DESCRIPTION, BankLayout
from midus_hf.files.json_text import parse_json
from midus_hf.files.locks import Lock, has_no_locks
from midus_hf.files.whole_files import sync, whole_file

_FORMAT = 2


def describe(layout: BankLayout, seed: int) -> dict[str, Any]:
    """Return the description of a bank that was trained with no tree yet.

    Args:
        layout: Of the bank.
        seed: What blocks start as that were never written.
    """
    return {"format": _FORMAT, "layout": layout.to_dict(), "seed": seed, "tree": None}


def described_again(description: dict[str, Any], layout: BankLayout, tree: str | None) -> dict[str, Any]:
    """Return the description of a copy of a bank.

    Args:
        description: Of the bank.
        layout: That the model's config implies, which may not know the digest of its base.
        tree: Fingerprint of the tree by whose paths the copy was trained; None if nobody knows it.
    """
    base = layout.base or description["layout"].get("base")
    return {**description, "layout": {**layout.to_dict(), "base": base}, "tree": tree}


def tree_of(description: dict[str, Any]) -> str | None:
    """Return the fingerprint of the tree by whose paths a bank was trained; None if nobody knows it, as before training."""
    return description.get("tree")


def check_same_tree(own: str | None, other: str | None, whose: str, remedy: str) -> str | None:
    """Refuse a tree by whose paths a bank was not trained.

    Args:
        own: Fingerprint of the tree by whose paths the bank was trained; None if nobody knows it.
        other: Fingerprint of the tree that is to be used with the bank; None if nobody knows it.
        whose: What a message calls whatever has the other tree.
        remedy: What a message says last: a sentence.

    Returns:
        The fingerprint of the tree of both; None if nobody knows it.

    Raises:
        ValueError: If both are known and differ.
    """
    if None not in (own, other) and own != other:
        raise ValueError(
            f"{whose} is of the tree with the fingerprint {str(other)[:16]}..., and the model's bank was trained with "
            f"{str(own)[:16]}...; expected one tree, since a node has another topic in another tree. {remedy}"
        )
    return own if other is None else other


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
        description = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BankError(
            f"there is no memory bank in {folder} ({error.strerror}: {BANK_DESCRIPTION}); expected one beside the model."
        ) from None
    except ValueError:
        raise BankError(f"{path} is no JSON; expected the description of a bank. Copy the bank again.") from None
    if not isinstance(description, dict) or description.get("format") != _FORMAT:
        raise BankError(f"{path} has another format than {_FORMAT}; expected a bank that this version reads.")
    difference = layout.difference(description.get("layout"))
    if difference:
        raise BankError(
            f"the memory bank in {folder} belongs to another model: {difference}. Put the model's own there."
        )
    if type(description.get("seed")) is not int:
        raise BankError(f"{path} has the seed {description.get('seed')!r}; expected an integer. Copy the bank again.")
    if not isinstance(description.get("tree"), str | None):
        raise BankError(
            f"{path} has the tree {description['tree']!r}; expected the fingerprint of a tree, or null. Copy the bank again."
        )
    return description


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

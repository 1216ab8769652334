"""The description of a bank, which ties the bank to its model and to its tree."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from midus_hf.banks.level_file import BankError
from midus_hf.config.fetched_blocks import BANK_DESCRIPTION, TREE_FILES, BankLayout
from midus_hf.files.json_text import parse_json
from midus_hf.files.outputs import whole_file

_FORMAT = 4


def new_description(layout: BankLayout, seed: int) -> dict[str, Any]:
    """Return the description of a new bank, which no tree has trained yet; `seed` decides how blocks start."""
    return {"format": _FORMAT, "layout": layout.to_dict(), "seed": seed, "tree": None, "roots": None, "grown_from": []}


def check_same_tree(
    own: str | None, other: str | None, owner: str, remedy: str, lineage: Collection[str] = ()
) -> str | None:
    """Check that a bank is used with the tree that trained the bank, and return the tree's fingerprint; None if unknown."""
    if None not in (own, other) and own != other and not {own, other} & set(lineage):
        raise ValueError(
            f"{owner} is of the tree with the fingerprint {str(other)[:16]}..., and the model's bank was trained with "
            f"{str(own)[:16]}...; expected one tree, since a node has another topic in another tree. {remedy}"
        )
    return own if other is None else other


def growth_of(folder: Path | None) -> dict[str, Any]:
    """Return `roots`, the nodes of the first level, and `grown_from`, the earlier fingerprints, of the tree in a folder, if any."""
    path = None if folder is None else folder / TREE_FILES[1]
    if path is None or not path.is_file():
        return {"roots": None, "grown_from": ()}
    record = parse_json(path.read_text(encoding="utf-8"))
    return {"roots": record.get("roots"), "grown_from": tuple(record.get("grown_from", ()))}


def grown_layouts(layouts: Mapping[str, BankLayout], folder: Path | None) -> dict[str, BankLayout]:
    """Return the layouts of banks, by the name of the memory, for the tree in a folder, which may have grown."""
    roots = growth_of(folder)["roots"]
    return {name: layout.with_roots(roots) for name, layout in layouts.items()}


def write_description(folder: Path, description: dict[str, Any]) -> None:
    """Write the description of a bank into the bank's folder. It marks the bank as complete, so it is written last."""
    with whole_file(folder / BANK_DESCRIPTION) as partial:
        partial.write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def read_description(folder: Path, layout: BankLayout) -> dict[str, Any]:
    """Read the description of a bank, and check that the bank belongs to the model whose config implies `layout`."""
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
    roots, grown_from, k = description.get("roots"), description.get("grown_from"), layout.blocks.branching
    are_fingerprints = isinstance(grown_from, list) and all(isinstance(each, str) for each in grown_from)
    for key, is_right, expected in (
        ("seed", type(description.get("seed")) is int, "an integer"),
        ("tree", isinstance(description.get("tree"), str | None), "the fingerprint of a tree, or null"),
        ("grown_from", are_fingerprints, "a list of fingerprints"),
        ("roots", roots is None or (type(roots) is int and roots >= k), f"null, or a number from {k} on"),
    ):
        if not is_right:
            raise BankError(
                f"{path} has the {key} {description.get(key)!r}; expected {expected}. Copy the bank again."
            )
    return description

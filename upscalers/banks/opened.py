"""Nodes of a tree as people write them, and opening of a checkpoint's banks and of their records, for reading and editing."""

import contextlib
import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from midus_hf.config.fetched_blocks import BANK_AUDIT, BANKS_FOLDER, BankLayout
from upscalers.checkpoint.base_model import open_base
from upscalers.request.errors import RequestError

if TYPE_CHECKING:
    from midus_hf.banks.audit import BankAudit
    from midus_hf.banks.memory_bank import MemoryBank

# A level, counted from 1, and the number of the node within the level, counted from 0.
Node = tuple[int, int]

_NODE = re.compile(r"([1-9]\d*):(\d+|generic)")


def parse_nodes(names: Sequence[str], layout: BankLayout, subtree: bool = False) -> list[Node]:
    """Return the nodes with blocks that a person names `LEVEL:NODE` or `LEVEL:generic`, ascending.

    Args:
        subtree: Whether to include all nodes below each node as well. Default: False.

    Raises:
        RequestError: If no node is named, or a name is not that of a node with a block.
    """
    if not names:
        raise RequestError("no node is named; expected one or more, each LEVEL:NODE, such as 2:52.")
    nodes: set[Node] = set()
    for name in names:
        match = _NODE.fullmatch(name)
        if match is None:
            raise RequestError(f"node is {name!r}; expected LEVEL:NODE, such as 2:52, or LEVEL:generic.")
        level = int(match[1])
        if not 1 <= level <= layout.num_levels:
            raise RequestError(f"node {name!r} is of level {level}; expected 1 to {layout.num_levels}.")
        count = layout.blocks.nodes(level)
        number = count if match[2] == "generic" else int(match[2])
        if number > count or (number == count and match[2] != "generic"):
            raise RequestError(f"node {name!r} is not there; expected 0 to {count - 1}, or generic.")
        if not subtree and level not in layout.levels:
            raise RequestError(f"level {level} has no blocks; expected one of {', '.join(map(str, layout.levels))}.")
        nodes |= set(_below(level, number, layout) if subtree else [(level, number)])
    return sorted(nodes)


def _below(level: int, number: int, layout: BankLayout) -> Iterable[Node]:
    """Yield a node and all nodes below, at levels with blocks. A generic node has the deeper generic nodes below it."""
    k = layout.blocks.branching
    for deeper in range(level, layout.num_levels + 1):
        if deeper in layout.levels:
            if number == layout.blocks.nodes(level):
                yield (deeper, layout.blocks.nodes(deeper))
                continue
            first = number * k ** (deeper - level)
            yield from ((deeper, node) for node in range(first, first + k ** (deeper - level)))


def written_node(node: Node, layout: BankLayout) -> str:
    """Return a node as people write it."""
    level, number = node
    return f"{level}:{'generic' if number == layout.blocks.nodes(level) else number}"


def written_nodes(bank: "MemoryBank") -> list[Node]:
    """Return the nodes of a bank whose blocks were written, level by level."""
    return [(level, index) for level in bank.layout.levels for index in bank.written(level)]


def find_layout(folder: Path, memory: str | None) -> tuple[str, BankLayout]:
    """Return the name of a memory that fetches blocks (of the only one, if `memory` is None), and the layout of its bank.

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
    """Open the bank of a memory in the folder of a checkpoint, and close the bank afterwards.

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


@contextlib.contextmanager
def record_of(folder: Path, make: bool = False) -> Iterator["BankAudit | None"]:
    """Open the record of what trained the blocks in a bank's folder, and close it afterwards; yield None if there is none.

    Args:
        make: Whether to create an empty record if there is none. Default: False.

    Raises:
        RequestError: If the record is damaged.
    """
    from midus_hf.banks.audit import BankAudit
    from midus_hf.banks.level_file import BankError

    path = folder / BANK_AUDIT
    if make and not path.exists():
        with BankAudit() as empty:
            empty.save(path)
    if not path.exists():
        yield None
        return
    try:
        with BankAudit(path) as record:
            yield record
    except BankError as error:
        raise RequestError(str(error)) from None
    except sqlite3.DatabaseError as error:
        raise RequestError(
            f"{path} is damaged ({error}); expected a record as a run wrote it. Copy the bank again."
        ) from None

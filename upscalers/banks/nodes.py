"""Nodes of a tree as people write them, and the blocks of the nodes."""

import re
from collections.abc import Iterable, Sequence

from midus_hf.config.fetched_blocks import BankLayout
from upscalers.request.errors import RequestError

# A level, counted from 1, and the number of the node within the level, counted from 0.
Node = tuple[int, int]

_NODE = re.compile(r"([1-9]\d*):(\d+|generic)")


def parse_nodes(names: Sequence[str], layout: BankLayout, subtree: bool = False) -> list[Node]:
    """Return the nodes with blocks that a person names, ascending.

    Args:
        names: Names of nodes, each `LEVEL:NODE` or `LEVEL:generic`.
        layout: Layout of the bank.
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

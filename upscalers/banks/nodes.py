"""Nodes of a tree as people write them, and the blocks that they have."""

import re
from collections.abc import Iterable, Sequence

from midus_hf.config.fetched_blocks import BankLayout
from upscalers.request.errors import RequestError

Node = tuple[int, int]
"""A level, counted from 1, and the node within it."""

_NODE = re.compile(r"([1-9]\d*):(\d+|generic)")


def parse_nodes(words: Sequence[str], layout: BankLayout, subtree: bool = False) -> list[Node]:
    """The blocks that somebody names, ascending.

    Args:
        words: Each `LEVEL:NODE`, or `LEVEL:generic`.
        layout: Of the bank.
        subtree: Whether all nodes below a node are meant as well. Default: false.

    Raises:
        RequestError: If one is no node that has a block, or none is named.
    """
    if not words:
        raise RequestError("no node is named; expected one or more, each LEVEL:NODE, such as 2:52.")
    nodes: set[Node] = set()
    for word in words:
        match = _NODE.fullmatch(word)
        if match is None:
            raise RequestError(f"node is {word!r}; expected LEVEL:NODE, such as 2:52, or LEVEL:generic.")
        level = int(match[1])
        if not 1 <= level <= layout.num_levels:
            raise RequestError(f"node {word!r} is of level {level}; expected 1 to {layout.num_levels}.")
        count = layout.blocks.nodes(level)
        number = count if match[2] == "generic" else int(match[2])
        if number > count or (number == count and match[2] != "generic"):
            raise RequestError(f"node {word!r} is not there; expected 0 to {count - 1}, or generic.")
        if not subtree and level not in layout.levels:
            raise RequestError(f"level {level} has no blocks; expected one of {', '.join(map(str, layout.levels))}.")
        nodes |= set(_below(level, number, layout) if subtree else [(level, number)])
    return sorted(nodes)


def _below(level: int, number: int, layout: BankLayout) -> Iterable[Node]:
    """A node and those below it, of levels that have blocks; the generic memory has none below."""
    k = layout.blocks.branching
    for deeper in range(level, layout.num_levels + 1):
        if deeper in layout.levels:
            if number == layout.blocks.nodes(level):
                yield (deeper, layout.blocks.nodes(deeper))
                continue
            first = number * k ** (deeper - level)
            yield from ((deeper, node) for node in range(first, first + k ** (deeper - level)))


def written_node(node: Node, layout: BankLayout) -> str:
    """A node as people write it."""
    level, number = node
    return f"{level}:{'generic' if number == layout.blocks.nodes(level) else number}"

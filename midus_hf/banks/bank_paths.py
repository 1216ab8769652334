"""Checks of documents' paths against the blocks of a model's banks."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from midus_hf.config.fetched_blocks import BankLayout


def check_nodes(paths: np.ndarray, banks: Mapping[str, BankLayout], text: str) -> None:
    """Check that a model's banks have a block for every node on the paths of documents.

    Args:
        paths: Nodes per level, `[documents, p]`, int64. A row of -1 stands for the generic memory.
        banks: Layouts of the model's banks by the name of the memory: one or more, all of the same tree.
        text: The documents' name in error messages.

    Raises:
        ValueError: If the paths have a different number of levels than the banks, have a negative number in a row that
            is not -1 at every level, name a node that does not exist, or name a node that is not a child of the node
            before it.
    """
    layout = next(iter(banks.values()))
    if len(paths) and paths.shape[1] != layout.num_levels:
        raise ValueError(
            f"{text} has paths of {paths.shape[1]} levels, and the model's banks have {layout.num_levels}; expected one tree. "
            f"Assign {text} by the tree that the model is for."
        )
    paths = paths[(paths != -1).any(1)]  # the other rows stand for the generic memory
    negative = np.flatnonzero((paths < 0).any(1))
    if len(negative):
        raise ValueError(
            f"{text} has the path {paths[negative[0]].tolist()}; expected a node of each level of the tree, or -1 at each level for "
            f"the generic memory. Assign {text} by the tree that the model is for."
        )
    for level, nodes in enumerate(paths.T, 1):
        if len(paths) and int(nodes.max()) >= layout.blocks.nodes(level):
            raise ValueError(
                f"{text} has node {int(nodes.max())} of level {level}, where the model's banks have "
                f"{layout.blocks.nodes(level)} blocks; expected one tree."
            )
    k = layout.blocks.branching
    strays = np.flatnonzero((paths[:, 1:] // k != paths[:, :-1]).any(1))
    if len(strays):
        stray = first_stray(paths[strays[0]].tolist(), k)
        assert stray is not None
        level, node, parent = stray
        raise ValueError(
            f"{text} has the path {paths[strays[0]].tolist()}, whose node {node} of level {level} is no child of node {parent}; "
            f"expected {k * parent} to {k * parent + k - 1}, the children of that node. Assign {text} by the tree that the model "
            "is for."
        )


def first_stray(path: Sequence[int], branching: int) -> tuple[int, int, int] | None:
    """Return the first node of a path that is not a child of the node before it, or None.

    Returns:
        The level of the node, counted from 1, the node, and the node before it.
    """
    for level, (parent, node) in enumerate(itertools.pairwise(path), 2):
        if node // branching != parent:
            return level, node, parent
    return None

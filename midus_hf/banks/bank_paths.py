"""Whether the paths of documents are ones that a model's banks have blocks for."""

from collections.abc import Mapping

import numpy as np

from midus_config.fetched_blocks import BankLayout


def check_nodes(paths: np.ndarray, banks: Mapping[str, BankLayout], text: str) -> None:
    """See that banks have blocks for the paths that documents come with.

    Args:
        paths: `[documents, p]`, int64.
        banks: Of a model, by the name of the memory: one or more, which are of one tree.
        text: What a message calls the documents.

    Raises:
        ValueError: If paths have another number of levels than the banks, or a node that is not there.
    """
    layout = next(iter(banks.values()))
    if len(paths) and paths.shape[1] != layout.num_levels:
        raise ValueError(
            f"{text} has paths of {paths.shape[1]} levels, and the model's banks have {layout.num_levels}; expected one tree. "
            f"Assign {text} by the tree that the model is for."
        )
    for level, nodes in enumerate(paths.T, 1):
        if len(paths) and int(nodes.max()) >= layout.blocks.nodes(level):
            raise ValueError(
                f"{text} has node {int(nodes.max())} of level {level}, where the model's banks have "
                f"{layout.blocks.nodes(level)} blocks; expected one tree."
            )

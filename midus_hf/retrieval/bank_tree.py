"""Whether a tree of topics is one that a model's banks have blocks for."""

from typing import Any

from midus_hf.retrieval.cluster_tree import ClusterTree


def check_tree(tree: ClusterTree, model: Any) -> None:
    """See that a tree has the shape of that by which the texts of a model fetch blocks.

    Of one with fewer children paths are those of other topics' blocks, and nothing else would tell.

    Args:
        tree: That paths are found by.
        model: Whose texts fetch blocks from banks.

    Raises:
        ValueError: If it has another number of levels, or of children.
    """
    for name, layout in model.banks.layouts.items():
        if (layout.blocks.branching, layout.num_levels) != (tree.branching, tree.levels):
            raise ValueError(
                f"memory {name!r} fetches blocks by a tree of {layout.num_levels} levels of {layout.blocks.branching}, and the "
                f"retriever has {tree.levels} levels of {tree.branching}; expected the tree that the bank was trained with."
            )

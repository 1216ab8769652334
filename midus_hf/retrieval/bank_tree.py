"""Check that a tree of topics fits a model's banks."""

from typing import Any

from midus_hf.retrieval.cluster_tree import ClusterTree


def check_tree(tree: ClusterTree, model: Any) -> None:
    """Check that a tree is the tree by which the texts of a model fetch blocks.

    Paths in another tree would lead to the blocks of other topics, which no other check would notice.

    Args:
        tree: Tree in which paths are looked up.
        model: Model whose texts fetch blocks from banks.

    Raises:
        ValueError: If the number of levels or of children differs, or the bank was trained with another tree.
    """
    for name, layout in model.banks.layouts.items():
        if (layout.blocks.branching, layout.num_levels) != (tree.branching, tree.levels):
            raise ValueError(
                f"memory {name!r} fetches blocks by a tree of {layout.num_levels} levels of {layout.blocks.branching}, and the "
                f"retriever has {tree.levels} levels of {tree.branching}; expected the tree that the bank was trained with."
            )
    model.banks.check_tree(
        tree.fingerprint,
        "the retriever",
        "If the model was saved with its tree, load the retriever from the folder of the model.",
    )

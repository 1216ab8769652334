"""Whether a tree of topics is one that a model's banks have blocks for."""

from typing import Any

from midus_hf.retrieval.cluster_tree import ClusterTree


def check_tree(tree: ClusterTree, model: Any) -> None:
    """See that a tree is the one by which the texts of a model fetch blocks.

    In another tree paths are those of other topics' blocks, and nothing else would tell.

    Args:
        tree: That paths are found by.
        model: Whose texts fetch blocks from banks.

    Raises:
        ValueError: If it has another number of levels, or of children, or is another tree than that which the bank was trained with.
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
        "Load the tree that lies beside the model, if the model was trained with one: its folder is a retriever's too.",
    )

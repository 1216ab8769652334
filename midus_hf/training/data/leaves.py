"""Texts that have paths in a tree of topics: each sequence has texts of one leaf, and the path by which it fetches blocks."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from midus_hf.banks.block_reader import check_paths
from midus_hf.config.fetched_blocks import TREE_COLUMN, BankLayout
from midus_hf.training.data.packing import Packer, packed_by, tokenised

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


def leaf_sequences(
    dataset: "Dataset",
    tokenizer: "PreTrainedTokenizerBase",
    sequence_length: int,
    *,
    paths: np.ndarray,
    depth: int | None = None,
    documents_apart: bool,
    text_column: str = "text",
    vocab_size: int | None = None,
) -> "Dataset":
    """Return the texts of a dataset as sequences within the leaves of a tree (hierarchical memories, appendix A.2).

    A leaf is a node of the deepest level that has blocks, so all texts of a leaf fetch the same blocks. Texts of a leaf
    are laid end to end in the order of the dataset and cut into sequences. The remainder becomes a sequence too, filled
    up with EOS on which no loss is computed: a leaf may have little text, and its blocks learn from no other text. A remainder of
    one token is left out, since nothing predicts it.

    Args:
        paths: Node of each level that a text is in, `[texts, p]`, as `paths_of` reads them.
        depth: Number of levels down to the deepest level that has blocks. Default: all levels.

    Returns:
        The columns of `packed_sequences`, `labels` `[T]`, and `memory_ids` `[p]`, the path of the leaf's first text.

    Raises:
        ValueError: As `packed_sequences`.
    """
    levels = paths[:, :depth]
    order = np.lexsort(levels.T[::-1])
    levels = levels[order]
    ends = np.append((levels[1:] != levels[:-1]).any(1), True)
    tokens = tokenised(dataset, tokenizer, text_column, vocab_size).select(order)
    tokens = tokens.add_column("memory_ids", list(paths[order])).add_column("ends_leaf", ends)
    return packed_by(tokens, Packer(sequence_length, documents_apart, fill=tokenizer.eos_token_id))


def paths_of(dataset: "Dataset", path_column: str) -> np.ndarray:
    """Return the node at each level of each text, `[texts, p]`, int64; a row of -1 is the path of the generic memory.

    Raises:
        ValueError: If the column is missing, or a row has no path, or one of another length than the first row's.
    """
    if path_column not in dataset.column_names:
        raise ValueError(
            f"the corpus has no column {path_column!r}, only {', '.join(dataset.column_names)}; set path_column to the column "
            "with the paths of texts, which midus cluster assign writes."
        )
    paths = list(dataset[path_column])
    for number, path in enumerate(paths, start=1):
        if not _is_path(path) or len(path) != len(paths[0]):
            raise ValueError(
                f"row {number} of the corpus has {path!r} under {path_column!r}; expected the node at each level of the tree, as "
                "midus cluster assign writes it, such as [3, 52, 840], or -1 at each level, the path of the generic memory."
            )
    return np.array(paths, dtype=np.int64).reshape(len(paths), -1)


def tree_of_paths(dataset: "Dataset", path_column: str) -> str | None:
    """Return the fingerprint of the tree that the paths of texts belong to; None if the texts do not name one.

    Raises:
        ValueError: If texts name different trees.
    """
    if TREE_COLUMN not in dataset.column_names:
        return None
    trees = dataset.unique(TREE_COLUMN)
    if len(trees) > 1:
        named = " and ".join("nothing" if tree is None else f"{str(tree)[:16]}..." for tree in trees[:2])
        raise ValueError(
            f"the corpus has {named} under {TREE_COLUMN!r}, beside the paths under {path_column!r}; expected paths of one tree. "
            "Assign all documents by the same tree."
        )
    return trees[0]


def checked_paths(
    dataset: "Dataset", banks: Mapping[str, BankLayout], path_column: str, text: str = "the corpus"
) -> np.ndarray:
    """Return the paths of a corpus as `paths_of` does, after a check that the model has blocks for them.

    Args:
        banks: Layouts of the banks from which texts fetch blocks, by the name of the memory.
        text: What messages call the corpus. Default: `"the corpus"`.

    Raises:
        ValueError: As `paths_of`; if the model has no banks, or the paths do not fit the tree of its banks.
    """
    if not banks:
        raise ValueError(
            f"path_column is {path_column!r}, but the model has no memory that fetches blocks; leave it out, or upscale with one of "
            "the methods hier-ffn, hier-lora-qk, hier-lora-vo, hier-lora-ffn and hier-kv."
        )
    paths = paths_of(dataset, path_column)
    for layout in banks.values():
        check_paths(torch.from_numpy(paths), layout, f"column {path_column!r} of {text}")
    return paths


def _is_path(path: Any) -> bool:
    if not isinstance(path, list) or not path or any(type(node) is not int for node in path):
        return False
    return all(node >= 0 for node in path) or all(node == -1 for node in path)

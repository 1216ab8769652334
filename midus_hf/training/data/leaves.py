"""Texts that have paths in a tree of topics: each sequence has texts of one leaf, and the path by which it fetches blocks."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from midus_hf.banks.block_reader import check_paths
from midus_hf.config.fetched_blocks import BankLayout
from midus_hf.topics.corpus import DocumentPaths, read_paths
from midus_hf.training.data.packing import PackedTexts, Packer, lengths_of, packed_by, tokenised

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
) -> PackedTexts:
    """Return the texts of a dataset as sequences within the leaves of a tree (hierarchical memories, appendix A.2).

    A leaf is a node of the deepest level that has blocks, so all texts of a leaf fetch the same blocks. Texts of a leaf
    are laid end to end in the order of the dataset and cut into sequences. The remainder becomes a sequence too, filled
    up with EOS on which no loss is computed: a leaf may have little text, and its blocks learn from no other text. A remainder of
    one token is left out, since nothing predicts it.

    Args:
        paths: Node of each level that a text is in, `[texts, p]`, as `read_paths` reads them.
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
    tokens = tokenised(dataset, tokenizer, text_column, vocab_size)
    lengths, tokens = lengths_of(tokens)[order], tokens.select(order)
    rests = np.add.reduceat(lengths, np.append(0, np.flatnonzero(ends)[:-1] + 1)) % sequence_length
    tokens = tokens.add_column("memory_ids", list(paths[order])).add_column("ends_leaf", ends)
    packed = packed_by(tokens, Packer(sequence_length, documents_apart, fill=tokenizer.eos_token_id))
    return PackedTexts(packed, int(lengths.sum()), int((rests == 1).sum()), bool((rests > 1).any()))


def checked_paths(
    dataset: "Dataset", banks: Mapping[str, BankLayout], path_column: str, text: str = "the corpus"
) -> DocumentPaths:
    """Return the paths of a corpus as `read_paths` does, after a check that the model has blocks for them.

    Args:
        banks: Layouts of the banks from which texts fetch blocks, by the name of the memory.
        text: What messages call the corpus. Default: `"the corpus"`.

    Raises:
        ValueError: As `read_paths`; if the model has no banks, or the paths do not fit the tree of its banks.
    """
    if not banks:
        raise ValueError(
            f"path_column is {path_column!r}, but the model has no memory that fetches blocks; leave it out, or upscale with one of "
            "the methods hier-ffn, hier-lora-qk, hier-lora-vo, hier-lora-ffn and hier-kv."
        )
    written = read_paths(dataset, path_column, text)
    for layout in banks.values():
        check_paths(torch.from_numpy(written.paths), layout, f"column {path_column!r} of {text}")
    return written

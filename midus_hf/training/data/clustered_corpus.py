"""A corpus whose documents have paths in a tree of topics: each sequence belongs to one leaf and has its path."""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch.utils.data import Dataset

from midus_hf.banks.bank_paths import check_nodes
from midus_hf.config.fetched_blocks import BankLayout
from midus_hf.topics.text_files import DocumentError
from midus_hf.training.data.former_packing import (
    IGNORED_LABEL,
    CorpusTokens,
    PackedSequence,
    check_length,
    training_example,
)


class ClusteredDataset(Dataset):
    """Documents packed within the leaves of a tree (hierarchical memories, appendix A.2).

    A leaf is a node of the deepest level that has blocks, so all documents of a leaf fetch the same blocks. Documents
    of a leaf are laid end to end in the order of the corpus and cut into sequences. The remainder becomes a sequence
    too, filled up with a token on which no loss is computed: a leaf may have little text, and the blocks of the leaf
    learn from no other text.

    Args:
        paths: `[documents, p]`, int64, the node of each level that a document is in.
        fill: Id of the token that sequences are filled up with.
        depth: Number of levels down to the deepest level that has blocks. Default: all p levels.
        document_mask: Whether tokens attend only within their document, as in `training_example`. Default: false.
        tree: Fingerprint of the tree that the paths belong to. Default: None, unknown.

    Raises:
        DocumentError: If the corpus is empty, or the number of paths is not the number of documents.
    """

    def __init__(
        self,
        tokens: CorpusTokens,
        paths: np.ndarray,
        sequence_length: int,
        fill: int,
        depth: int | None = None,
        document_mask: bool = False,
        tree: str | None = None,
    ):
        check_length(tokens.num_documents, tokens.num_tokens, 0)
        if len(paths) != tokens.num_documents:
            raise DocumentError(
                f"the corpus has paths of {len(paths):,} documents and tokens of {tokens.num_documents:,}; expected equal "
                "numbers. The corpus changed while it was read: start again."
            )
        self.tokens, self.sequence_length = tokens, sequence_length
        self.fill, self.document_mask, self.tree = fill, document_mask, tree
        self._bounds = tokens.document_bounds()
        # The documents leaf by leaf, within a leaf in the order of the corpus, and where each document begins in this order.
        levels_to_leaf = paths[:, :depth]
        self._order = np.lexsort(levels_to_leaf.T[::-1])
        lengths = (self._bounds[1:] - self._bounds[:-1])[self._order]
        self._begins = np.concatenate([[0], np.cumsum(lengths)])
        sorted_paths = levels_to_leaf[self._order]
        is_first = np.concatenate([[True], (sorted_paths[1:] != sorted_paths[:-1]).any(1)])
        first_documents = np.flatnonzero(is_first)
        ends = self._begins[np.concatenate([first_documents[1:], [len(paths)]])]
        leaf_begins = self._begins[first_documents]
        counts = -(-(ends - leaf_begins) // sequence_length)
        self._leaf = np.repeat(np.arange(len(counts)), counts)  # the leaf of each sequence
        number_in_leaf = np.arange(len(self._leaf)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._sequence_begins = leaf_begins[self._leaf] + number_in_leaf * sequence_length
        self._sequence_ends = np.minimum(self._sequence_begins + sequence_length, ends[self._leaf])
        # Below the level of a leaf, its path has the nodes of its first document.
        self._leaf_paths = paths[self._order[first_documents]]
        self.num_leaves = len(counts)

    def __len__(self) -> int:
        return len(self._leaf)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        parts = [self.tokens.cut(first, last) for _, first, last in self._stretches(index)]
        length = sum(len(part.tokens) for part in parts)
        missing = self.sequence_length - length
        tokens = torch.cat([*(part.tokens for part in parts), torch.full((missing,), self.fill, dtype=torch.int32)])
        starts = torch.cat([*(part.starts for part in parts), torch.zeros(missing, dtype=torch.bool)])
        if missing:
            starts[length] = True
        example = training_example(PackedSequence(tokens, starts), self.document_mask)
        example["labels"][length:] = IGNORED_LABEL
        return {**example, "memory_ids": torch.from_numpy(self.path(index))}

    def path(self, index: int) -> np.ndarray:
        """Return the path of the leaf that a sequence belongs to, `[p]`, int64."""
        return self._leaf_paths[self._leaf[index]].copy()

    def documents(self, index: int) -> list[tuple[int, int]]:
        """Return the index in the corpus of each document in a sequence, and its number of tokens there."""
        return [(document, end - begin) for document, begin, end in self._stretches(index)]

    def _stretches(self, index: int) -> Iterator[tuple[int, int, int]]:
        """Yield the index of each document in a sequence, and where its piece begins and ends among all tokens."""
        begin, end = int(self._sequence_begins[index]), int(self._sequence_ends[index])
        number = int(np.searchsorted(self._begins, begin, side="right")) - 1
        while begin < end:
            document = int(self._order[number])
            first = int(self._bounds[document]) + begin - int(self._begins[number])
            until = min(end, int(self._begins[number + 1]))
            yield document, first, first + until - begin
            begin, number = until, number + 1


def check_paths(paths: np.ndarray, banks: Mapping[str, BankLayout], column: str, text: str = "the corpus") -> None:
    """Check that a model has blocks for the paths of a corpus.

    Args:
        paths: `[documents, p]`, int64, the node of each level that a document is in.

    Raises:
        ValueError: If the model has no banks, or the paths do not fit the tree of its banks.
    """
    if not banks:
        raise ValueError(
            f"corpus.path_column is {column!r}, but the model has no memory that fetches blocks; leave it out, or upscale with one "
            "of the methods hier-ffn, hier-lora-qk, hier-lora-vo, hier-lora-ffn and hier-kv."
        )
    check_nodes(paths, banks, text)

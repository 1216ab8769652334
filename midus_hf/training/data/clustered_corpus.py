"""A corpus whose documents have a path in a tree of topics: sequences are of one leaf, and come with its path."""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch.utils.data import Dataset

from midus_hf.banks.bank_paths import check_nodes
from midus_hf.config.fetched_blocks import BankLayout
from midus_hf.documents import DocumentError
from midus_hf.training.data.mapped_tokens import MappedTokens
from midus_hf.training.data.packing import IGNORED_LABEL, PackedSequence, check_length, training_example


class ClusteredDataset(Dataset):
    """Documents packed within the leaves of a tree (hierarchical memories, appendix A.2).

    A leaf is a node of the deepest level that has blocks: documents of one leaf fetch the same. Those of a leaf are laid end to end
    in the order of the corpus and cut into sequences. What is left over is a sequence too, filled up with a token that is no label:
    a leaf may have little text, and it is all that its blocks learn from.

    Args:
        tokens: Of all documents.
        paths: `[documents, p]`, int64, the node of each level that a document is in.
        sequence_length: T.
        fill: The token that sequences are filled up with.
        depth: Levels of the path down to the deepest that has blocks. Default: all.
        document_mask: As in `training_example`. Default: false.
        tree: Fingerprint of the tree that the paths are of. Default: None, nobody knows it.

    Raises:
        DocumentError: If the corpus is empty, or paths are not as many as documents.
    """

    def __init__(
        self,
        tokens: MappedTokens,
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
                f"the corpus has paths of {len(paths):,} documents and tokens of {tokens.num_documents:,}; expected as many. It has "
                "changed while it was read: start again."
            )
        self.tokens, self.paths, self.sequence_length = tokens, paths, sequence_length
        self.fill, self.document_mask, self.tree = fill, document_mask, tree
        self.num_documents, self.num_tokens = tokens.num_documents, tokens.num_tokens
        self._bounds = tokens.document_bounds()
        # Documents leaf by leaf, in the order of the corpus within each; where each begins in that order.
        deciding = paths[:, :depth]
        self._order = np.lexsort(deciding.T[::-1])
        lengths = (self._bounds[1:] - self._bounds[:-1])[self._order]
        self._begins = np.concatenate([[0], np.cumsum(lengths)])
        sorted_paths = deciding[self._order]
        is_first = np.concatenate([[True], (sorted_paths[1:] != sorted_paths[:-1]).any(1)])
        first_documents = np.flatnonzero(is_first)
        ends = self._begins[np.concatenate([first_documents[1:], [len(paths)]])]
        leaf_begins = self._begins[first_documents]
        counts = -(-(ends - leaf_begins) // sequence_length)
        self._leaf = np.repeat(np.arange(len(counts)), counts)  # of each sequence
        within = np.arange(len(self._leaf)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._sequence_begins = leaf_begins[self._leaf] + within * sequence_length
        self._sequence_ends = np.minimum(self._sequence_begins + sequence_length, ends[self._leaf])
        self._leaf_paths = paths[self._order[first_documents]]  # below the leaf, those of its first document
        self.num_leaves = len(counts)

    def __len__(self) -> int:
        return len(self._leaf)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        parts = list(self._parts(int(self._sequence_begins[index]), int(self._sequence_ends[index])))
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
        """Return the path of the leaf that a sequence is of, `[p]`."""
        return self._leaf_paths[self._leaf[index]].copy()

    def documents(self, index: int) -> list[tuple[int, int]]:
        """The documents in a sequence, by their place in the corpus, and how many tokens it has of each."""
        stretches = self._stretches(int(self._sequence_begins[index]), int(self._sequence_ends[index]))
        return [(document, end - begin) for document, begin, end in stretches]

    def _parts(self, begin: int, end: int) -> Iterator[PackedSequence]:
        """The pieces of documents between two places in the order of leaves."""
        return (self.tokens.cut(first, last) for _, first, last in self._stretches(begin, end))

    def _stretches(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Each of these documents, and where its piece begins and ends among all tokens."""
        number = int(np.searchsorted(self._begins, begin, side="right")) - 1
        while begin < end:
            document = int(self._order[number])
            first = int(self._bounds[document]) + begin - int(self._begins[number])
            until = min(end, int(self._begins[number + 1]))
            yield document, first, first + until - begin
            begin, number = until, number + 1


def check_paths(paths: np.ndarray, banks: Mapping[str, BankLayout], column: str, text: str = "the corpus") -> None:
    """See that a model has blocks for the paths of a corpus.

    Args:
        paths: `[documents, p]`.
        banks: Of the model, by the name of the memory.
        column: That holds the paths.
        text: What a message calls what has them. Default: `"the corpus"`.

    Raises:
        ValueError: If it has no banks, or the tree of its banks is another.
    """
    if not banks:
        raise ValueError(
            f"corpus.path_column is {column!r}, but the model has no memory that fetches blocks; leave it out, or upscale with one "
            "of the methods hier-ffn, hier-lora-qk, hier-lora-vo, hier-lora-ffn and hier-kv."
        )
    check_nodes(paths, banks, text)


def describe_leaves(dataset: ClusteredDataset) -> str:
    """What packing within leaves made."""
    places = len(dataset) * dataset.sequence_length
    return (
        f"packed within {dataset.num_leaves:,} leaves: {len(dataset):,} sequences of {dataset.sequence_length:,} "
        f"({1 - dataset.num_tokens / places:.1%} of their places filled up)"
    )

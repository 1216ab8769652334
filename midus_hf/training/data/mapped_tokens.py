"""Tokens of a corpus that stay on disk: sequences are cut from memory-mapped Arrow files when they are used."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from midus_hf.training.data.packing import PackedSequence, check_length, training_example


class MappedTokens:
    """The tokens of documents, laid end to end.

    Args:
        chunks: Arrow arrays of int32 lists, one list per document, in the order of the corpus. No list is empty. Only
            the parts of the mapped files that a cut needs are read.
    """

    def __init__(self, chunks: Sequence[Any]):
        # Views of the map: `values[offsets[d]:offsets[d + 1]]` are the tokens of document d of a chunk.
        self._values = [chunk.values.to_numpy(zero_copy_only=True) for chunk in chunks]
        self._offsets = [chunk.offsets.to_numpy(zero_copy_only=True) for chunk in chunks]
        lengths = [int(offsets[-1] - offsets[0]) for offsets in self._offsets]
        self._begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
        self.num_documents = sum(len(chunk) for chunk in chunks)
        self.num_tokens = int(self._begins[-1])

    def cut(self, begin: int, end: int) -> PackedSequence:
        """Return the tokens at positions `begin` to `end` (exclusive), and which of them begin a document.

        Args:
            begin: First position, 0 or more.
            end: Position after the last, above `begin` and at most `num_tokens`.
        """
        tokens = np.empty(end - begin, np.int32)
        starts = np.zeros(end - begin, np.bool_)
        chunk = int(np.searchsorted(self._begins, begin, side="right")) - 1
        position = begin
        while position < end:
            offsets = self._offsets[chunk]
            # Added to a position among all tokens, this gives the position in the values of this chunk.
            shift = int(offsets[0]) - int(self._begins[chunk])
            until = min(end, int(self._begins[chunk + 1]))
            tokens[position - begin : until - begin] = self._values[chunk][position + shift : until + shift]
            first, last = np.searchsorted(offsets[:-1], (position + shift, until + shift))
            starts[offsets[first:last] - shift - begin] = True
            position, chunk = until, chunk + 1
        return PackedSequence(torch.from_numpy(tokens), torch.from_numpy(starts))

    def document_bounds(self) -> np.ndarray:
        """Return where each document begins among all tokens, and where the last one ends, `[documents + 1]`, int64."""
        begins = [
            offsets[:-1] - offsets[0] + begin for offsets, begin in zip(self._offsets, self._begins[:-1], strict=True)
        ]
        return np.concatenate([*begins, self._begins[-1:]]).astype(np.int64)

    def largest_id(self) -> int:
        """Return the largest token id; this reads all tokens, a chunk at a time."""
        return max(
            int(values[offsets[0] : offsets[-1]].max())
            for values, offsets in zip(self._values, self._offsets, strict=True)
            if offsets[-1] > offsets[0]
        )


class MappedDataset(Dataset):
    """Sequences of mapped tokens, the same as `pack` yields for the same documents.

    Args:
        tokens: Tokens of the whole corpus.
        sequence_length: T, tokens per sequence.
        document_mask: Whether tokens attend only within their document, as in `training_example`. Default: false.

    Raises:
        DocumentError: If the corpus is empty or shorter than one sequence.
    """

    def __init__(self, tokens: MappedTokens, sequence_length: int, document_mask: bool = False):
        check_length(tokens.num_documents, tokens.num_tokens, sequence_length)
        self.tokens, self.sequence_length, self.document_mask = tokens, sequence_length, document_mask
        self.num_documents, self.num_tokens = tokens.num_documents, tokens.num_tokens

    def __len__(self) -> int:
        return self.num_tokens // self.sequence_length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        begin = index * self.sequence_length
        return training_example(self.tokens.cut(begin, begin + self.sequence_length), self.document_mask)

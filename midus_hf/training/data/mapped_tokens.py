"""Tokens of a corpus that stay on disk: sequences are cut from memory-mapped Arrow, and nothing is copied ahead."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from midus_hf.training.data.packing import PackedSequence, check_length, training_example


class MappedTokens:
    """The tokens of documents, laid end to end.

    Args:
        chunks: Arrow arrays of int32 lists, a document per list, in the order of the corpus. Lists are not empty. What
            they are mapped from is read where it is cut, and only there.
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
        """The tokens from place `begin` up to place `end` of all of them, and which of them begin a document.

        Args:
            begin: 0 or more.
            end: More than `begin`, and at most `num_tokens`.
        """
        tokens = np.empty(end - begin, np.int32)
        starts = np.zeros(end - begin, np.bool_)
        chunk = int(np.searchsorted(self._begins, begin, side="right")) - 1
        place = begin
        while place < end:
            offsets = self._offsets[chunk]
            # From places among all tokens to places in the values of this chunk.
            shift = int(offsets[0]) - int(self._begins[chunk])
            until = min(end, int(self._begins[chunk + 1]))
            tokens[place - begin : until - begin] = self._values[chunk][place + shift : until + shift]
            first, last = np.searchsorted(offsets[:-1], (place + shift, until + shift))
            starts[offsets[first:last] - shift - begin] = True
            place, chunk = until, chunk + 1
        return PackedSequence(torch.from_numpy(tokens), torch.from_numpy(starts))

    def document_bounds(self) -> np.ndarray:
        """Where each document begins among all tokens, and where the last one ends, `[documents + 1]`, int64."""
        begins = [
            offsets[:-1] - offsets[0] + begin for offsets, begin in zip(self._offsets, self._begins[:-1], strict=True)
        ]
        return np.concatenate([*begins, self._begins[-1:]]).astype(np.int64)

    def largest_id(self) -> int:
        """The largest of the tokens; all are read for it, a chunk at a time."""
        return max(
            int(values[offsets[0] : offsets[-1]].max())
            for values, offsets in zip(self._values, self._offsets, strict=True)
            if offsets[-1] > offsets[0]
        )


class MappedDataset(Dataset):
    """The sequences of mapped tokens: those that `pack` makes of the same documents.

    Args:
        tokens: All of the corpus.
        sequence_length: T.
        document_mask: As in `training_example`. Default: false.

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

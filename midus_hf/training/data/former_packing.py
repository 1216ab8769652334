"""Documents packed into sequences of one length.

Every document is tokenised with its tokenizer's default settings and ends in EOS, and all documents are laid end to
end. The row of tokens is cut every `sequence_length` tokens and the remainder at the end is dropped, as is usual in
continual pretraining. With a document mask, positions restart where a document begins: if a model gets these positions,
and neither an attention mask nor a cache, it attends only within each document.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from midus_hf.saved_models import check_ids
from midus_hf.topics.text_files import DocumentError

# Label of tokens that transformers' losses leave out.
IGNORED_LABEL = -100

_DOCUMENTS_A_BATCH = 64
# Together with `_DOCUMENTS_A_BATCH`, this bounds the memory of a tokenizer, which takes about a hundred bytes per token.
_CHARACTERS_A_BATCH = 2**20


class PackedSequence(NamedTuple):
    """One sequence: `tokens` `[T]`, int32, and `starts` `[T]`, bool, true where a document begins."""

    tokens: torch.Tensor
    starts: torch.Tensor


def tokenise(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, vocab_size: int | None = None
) -> Iterator[list[int]]:
    """Turn documents into token ids, each document ending in EOS.

    Args:
        tokenizer: A tokenizer with an EOS token; it adds its default special tokens.
        vocab_size: Number of ids the model embeds. Default: unchecked.

    Raises:
        ValueError: If the tokenizer has no EOS token, or yields an id that the model does not embed.
    """
    eos = tokenizer.eos_token_id
    if eos is None:
        raise ValueError("the tokenizer has no EOS token, which ends every document; set eos_token in its folder.")
    for batch in _batches(documents):
        for ids in tokenizer(batch, return_attention_mask=False, verbose=False)["input_ids"]:
            ids = ids if ids and ids[-1] == eos else [*ids, eos]
            if vocab_size is not None:
                check_ids(max(ids), vocab_size)
            yield ids


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document)
        if len(batch) == _DOCUMENTS_A_BATCH or characters >= _CHARACTERS_A_BATCH:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def pack(token_lists: Iterable[list[int]], sequence_length: int) -> Iterator[PackedSequence]:
    """Lay the token ids of documents end to end and cut them into sequences; the remainder is dropped.

    Raises:
        DocumentError: At the end, if the corpus is empty or shorter than one sequence.
    """
    pending, starts = array("i"), []
    num_documents = num_tokens = 0
    for tokens in token_lists:
        num_documents, num_tokens = num_documents + 1, num_tokens + len(tokens)
        starts.append(len(pending))
        pending.extend(tokens)
        full = len(pending) // sequence_length * sequence_length
        if full:
            is_start = torch.zeros(full, dtype=torch.bool)
            is_start[[start for start in starts if start < full]] = True
            cut = torch.tensor(pending[:full], dtype=torch.int32)
            yield from map(PackedSequence, cut.split(sequence_length), is_start.split(sequence_length))
            del pending[:full]
            starts = [start - full for start in starts if start >= full]
    check_length(num_documents, num_tokens, sequence_length)


def training_example(sequence: PackedSequence, document_mask: bool) -> dict[str, torch.Tensor]:
    """Return the inputs of a causal language model for one sequence.

    Args:
        document_mask: Whether to add positions that restart with each document. The first token of a document is then
            no label, since nothing that it attends to predicts it.

    Returns:
        `input_ids` and `labels` `[T]`, int64 (the model shifts labels itself), and `position_ids` `[T]`, int64, with a
        document mask.
    """
    tokens = sequence.tokens.long()  # [T]
    if not document_mask:
        return {"input_ids": tokens, "labels": tokens.clone()}
    index = torch.arange(len(tokens))  # [T]
    begin = torch.where(sequence.starts, index, 0).cummax(0).values  # [T]
    labels = tokens.masked_fill(sequence.starts, IGNORED_LABEL)
    return {"input_ids": tokens, "labels": labels, "position_ids": index - begin}


def check_length(num_documents: int, num_tokens: int, sequence_length: int) -> None:
    """Check that a corpus is long enough for one sequence of `sequence_length` tokens.

    Raises:
        DocumentError: If the corpus is empty or shorter than one sequence.
    """
    if num_documents == 0:
        raise DocumentError("the corpus is empty: it has no document with a visible character. Add text to it.")
    if num_tokens < sequence_length:
        raise DocumentError(
            f"the corpus has {num_tokens} tokens; expected at least one sequence of sequence_length = "
            f"{sequence_length}. Add text, or lower sequence_length."
        )


class CorpusTokens:
    """The tokens of a corpus's documents, laid end to end, in memory or in memory-mapped files.

    Args:
        chunks: For each chunk of documents its `values`, int32, and `offsets`: `values[offsets[d]:offsets[d + 1]]` are
            the tokens of document d of the chunk, of which there are some. Of mapped files, only the parts that a cut
            needs are read.
    """

    def __init__(self, chunks: Sequence[tuple[np.ndarray, np.ndarray]]):
        self._chunks = chunks
        lengths = [int(offsets[-1] - offsets[0]) for _, offsets in chunks]
        self._begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
        self.num_documents = sum(len(offsets) - 1 for _, offsets in chunks)
        self.num_tokens = int(self._begins[-1])

    @classmethod
    def held(cls, token_lists: Iterable[list[int]]) -> "CorpusTokens":
        """Return the tokens of documents in memory, four bytes per token."""
        values, offsets = array("i"), array("q", [0])
        for tokens in token_lists:
            values.extend(tokens)
            offsets.append(len(values))
        return cls([(np.asarray(values, np.int32), np.asarray(offsets, np.int64))])

    def cut(self, begin: int, end: int) -> PackedSequence:
        """Return the tokens at positions `begin` to `end` (exclusive), and which of them begin a document."""
        tokens = np.empty(end - begin, np.int32)
        starts = np.zeros(end - begin, np.bool_)
        chunk = int(np.searchsorted(self._begins, begin, side="right")) - 1
        position = begin
        while position < end:
            values, offsets = self._chunks[chunk]
            # Added to a position among all tokens, this gives the position in the values of this chunk.
            shift = int(offsets[0]) - int(self._begins[chunk])
            until = min(end, int(self._begins[chunk + 1]))
            tokens[position - begin : until - begin] = values[position + shift : until + shift]
            first, last = np.searchsorted(offsets[:-1], (position + shift, until + shift))
            starts[offsets[first:last] - shift - begin] = True
            position, chunk = until, chunk + 1
        return PackedSequence(torch.from_numpy(tokens), torch.from_numpy(starts))

    def document_bounds(self) -> np.ndarray:
        """Return where each document begins among all tokens, and where the last one ends, `[documents + 1]`, int64."""
        chunks = zip(self._chunks, self._begins[:-1], strict=True)
        begins = [offsets[:-1] - offsets[0] + begin for (_, offsets), begin in chunks]
        return np.concatenate([*begins, self._begins[-1:]]).astype(np.int64)

    def largest_id(self) -> int:
        """Return the largest token id; this reads all tokens, a chunk at a time."""
        used = [values[offsets[0] : offsets[-1]] for values, offsets in self._chunks]
        return max(int(values.max()) for values in used if len(values))


class PackedDataset(Dataset):
    """Sequences of a corpus.

    Args:
        document_mask: Whether tokens attend only within their document, as in `training_example`. Default: false.

    Raises:
        DocumentError: If the corpus is empty or shorter than one sequence.
    """

    def __init__(self, tokens: CorpusTokens, sequence_length: int, document_mask: bool = False):
        check_length(tokens.num_documents, tokens.num_tokens, sequence_length)
        self.tokens, self.sequence_length, self.document_mask = tokens, sequence_length, document_mask

    def __len__(self) -> int:
        return self.tokens.num_tokens // self.sequence_length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        begin = index * self.sequence_length
        return training_example(self.tokens.cut(begin, begin + self.sequence_length), self.document_mask)


class PackedStream(IterableDataset):
    """A corpus packed while it is read, repeated without end, always in the same order.

    The stream has no end, so a run on it ends after a number of steps. The n-th sequence is always the same, so a run
    can resume at any step.

    Args:
        start_pass: Starts a pass over the corpus, which yields the token ids of each document.
        document_mask: Whether tokens attend only within their document, as in `training_example`. Default: false.

    Raises:
        DocumentError: When read, if the corpus is empty or shorter than one sequence.
    """

    def __init__(
        self, start_pass: Callable[[], Iterable[list[int]]], sequence_length: int, document_mask: bool = False
    ):
        self.start_pass, self.sequence_length, self.document_mask = start_pass, sequence_length, document_mask

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            for sequence in pack(self.start_pass(), self.sequence_length):
                yield training_example(sequence, self.document_mask)

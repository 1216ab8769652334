"""Documents packed into sequences of one length.

Every document is tokenised with its tokenizer's default settings and ends in EOS, and all documents are laid end to
end. The row of tokens is cut every `sequence_length` tokens and the remainder at the end is dropped, as is usual in
continual pretraining. With a document mask, positions restart where a document begins: if a model gets these positions,
and neither an attention mask nor a cache, it attends only within each document.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from midus_hf.documents import DocumentError
from midus_hf.saved_models import check_ids

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
        documents: Texts of the documents.
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


def pack(token_lists: Iterable[list[int]], sequence_length: int) -> Iterator[PackedSequence]:
    """Lay token lists end to end and cut them into sequences; the remainder is dropped.

    Args:
        token_lists: Token ids of each document.
        sequence_length: T, tokens per sequence.
    """
    pending: list[int] = []
    starts: list[int] = []
    for tokens in token_lists:
        starts.append(len(pending))
        pending += tokens
        full = len(pending) // sequence_length * sequence_length
        if full:
            is_start = torch.zeros(full, dtype=torch.bool)
            is_start[[start for start in starts if start < full]] = True
            cut = torch.tensor(pending[:full], dtype=torch.int32)
            yield from map(PackedSequence, cut.split(sequence_length), is_start.split(sequence_length))
            del pending[:full]
            starts = [start - full for start in starts if start >= full]


def training_example(sequence: PackedSequence, document_mask: bool) -> dict[str, torch.Tensor]:
    """Return the inputs of a causal language model for one sequence.

    Args:
        sequence: Tokens and starts of documents.
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
    """Check that a corpus is long enough for one sequence.

    Args:
        num_documents: Number of documents in the corpus.
        num_tokens: Number of tokens in all documents together.
        sequence_length: T, tokens per sequence.

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


class CorpusPass:
    """One pass over a corpus: iterating yields its sequences, and counts documents and tokens.

    Args:
        documents: Texts of the documents.
        tokenizer: A tokenizer with an EOS token, as in `tokenise`.
        sequence_length: T, tokens per sequence.
        vocab_size: Number of ids the model embeds. Default: unchecked.

    Raises:
        DocumentError: At the end of the pass, if the corpus is empty or shorter than one sequence.
        ValueError: If `tokenise` raises it.
    """

    def __init__(
        self,
        documents: Iterable[str],
        tokenizer: PreTrainedTokenizerBase,
        sequence_length: int,
        vocab_size: int | None = None,
    ):
        self.token_lists = tokenise(documents, tokenizer, vocab_size)
        self.sequence_length = sequence_length
        self.num_documents = self.num_tokens = 0

    def __iter__(self) -> Iterator[PackedSequence]:
        yield from pack(self._counted(), self.sequence_length)
        check_length(self.num_documents, self.num_tokens, self.sequence_length)

    def _counted(self) -> Iterator[list[int]]:
        for tokens in self.token_lists:
            self.num_documents += 1
            self.num_tokens += len(tokens)
            yield tokens


class PackedDataset(Dataset):
    """A corpus packed in memory, five bytes per token.

    Args:
        corpus: A new pass over the corpus, which the constructor consumes.
        document_mask: Whether tokens attend only within their document, as in `training_example`. Default: false.

    Raises:
        DocumentError: If the corpus is empty or shorter than one sequence.
        ValueError: If `tokenise` raises it.
    """

    def __init__(self, corpus: CorpusPass, document_mask: bool = False):
        self.sequences = list(corpus)
        self.num_documents, self.num_tokens = corpus.num_documents, corpus.num_tokens
        self.document_mask = document_mask

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return training_example(self.sequences[index], self.document_mask)


class PackedStream(IterableDataset):
    """A corpus packed while it is read, repeated without end, always in the same order.

    The stream has no end, so a run on it ends after a number of steps. The n-th sequence is always the same, so a run
    can resume at any step.

    Args:
        start_pass: Starts a pass over the corpus.
        document_mask: Whether tokens attend only within their document, as in `training_example`. Default: false.

    Raises:
        DocumentError: When read, if the corpus is empty or shorter than one sequence.
        ValueError: When read, if `tokenise` raises it.
    """

    def __init__(self, start_pass: Callable[[], CorpusPass], document_mask: bool = False):
        self.start_pass, self.document_mask = start_pass, document_mask

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            for sequence in self.start_pass():
                yield training_example(sequence, self.document_mask)


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

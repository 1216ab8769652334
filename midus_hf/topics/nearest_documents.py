"""Passages of documents, and the passage nearest to a question, which retrieval-augmented generation puts before the question."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from transformers import PreTrainedTokenizerBase

from midus_hf.topics.embedding import TextEmbedder

_QUESTIONS_AT_A_TIME = 256


class NearestDocuments:
    """Finder of the one document whose embedding is nearest to a question's (hierarchical memories, appendix H).

    The paper compares only the documents of the question's cluster. This class compares all documents, so the document
    that it returns is at least as near.

    Args:
        documents: The documents to choose from.
        embedder: Embedder of documents and questions. It reads the first `embedder.max_tokens` tokens of each.
        progress: Called with the number of documents of each batch that is embedded. Default: None.

    Raises:
        ValueError: If there are no documents.
    """

    def __init__(
        self, documents: Sequence[str], embedder: TextEmbedder, progress: Callable[[int], object] | None = None
    ):
        if not documents:
            raise ValueError("there are no documents; expected one or more.")
        self.documents, self.embedder = list(documents), embedder
        self._rows = embedder.embed(self.documents, progress)  # [documents, c]
        self._known: dict[str, int] = {}

    def __call__(self, questions: Sequence[str]) -> list[str]:
        """Return the nearest document of each question, or the first among equally near ones."""
        new = [question for question in dict.fromkeys(questions) if question not in self._known]
        for first in range(0, len(new), _QUESTIONS_AT_A_TIME):
            batch = new[first : first + _QUESTIONS_AT_A_TIME]
            nearness: torch.Tensor = self.embedder.embed(batch) @ self._rows.T  # [questions, documents]
            self._known |= zip(batch, nearness.argmax(dim=1).tolist(), strict=True)
        return [self.documents[self._known[question]] for question in questions]


def cut_into_passages(documents: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[str]:
    """Cut documents at line ends into passages. A line is cut only if it alone has too many tokens.

    Args:
        documents: Whole documents, not yet cut.
        tokenizer: Fast tokenizer that counts tokens, without special tokens.
        max_tokens: Most tokens of a passage, counted line by line.

    Returns:
        The passages of all documents, in order, stripped of white space and without empty ones.
    """
    passages = []
    for document in documents:
        gathered, count = "", 0
        for piece, tokens in _pieces(document, tokenizer, max_tokens):
            if gathered and count + tokens > max_tokens:
                passages.append(gathered)
                gathered, count = "", 0
            gathered, count = gathered + piece, count + tokens
        passages.append(gathered)
    return [passage.strip() for passage in passages if passage.strip()]


def _pieces(document: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Iterator[tuple[str, int]]:
    """Yield lines, or parts of lines with too many tokens, each with its number of tokens."""
    lines = document.splitlines(keepends=True)
    if not lines:
        return
    offsets = tokenizer(lines, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    for line, spans in zip(lines, offsets, strict=True):
        cuts = [0, *(spans[first][0] for first in range(max_tokens, len(spans), max_tokens)), len(line)]
        for number, (begin, end) in enumerate(pairwise(cuts)):
            yield line[begin:end], min(max_tokens, len(spans) - number * max_tokens)

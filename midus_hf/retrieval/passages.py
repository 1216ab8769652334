"""Documents cut into passages that are short enough for an embedding model and a context."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from transformers import PreTrainedTokenizerBase


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

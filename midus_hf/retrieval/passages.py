"""Documents cut into passages, which an embedding can tell and a context can hold."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from transformers import PreTrainedTokenizerBase


def cut_into_passages(documents: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[str]:
    """Cut documents at the ends of lines, and within a line only where it alone has too many tokens.

    Args:
        documents: Whole ones.
        tokenizer: By which tokens are counted, special ones aside; a fast one.
        max_tokens: Tokens of a passage at most, counted line by line.

    Returns:
        The passages of all documents, in order, without those that are empty and without space at their ends.
    """
    found = []
    for document in documents:
        gathered, count = "", 0
        for piece, tokens in _pieces(document, tokenizer, max_tokens):
            if gathered and count + tokens > max_tokens:
                found.append(gathered)
                gathered, count = "", 0
            gathered, count = gathered + piece, count + tokens
        found.append(gathered)
    return [passage.strip() for passage in found if passage.strip()]


def _pieces(document: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Iterator[tuple[str, int]]:
    """Lines, and parts of those that have too many tokens; with the tokens of each."""
    lines = document.splitlines(keepends=True)
    if not lines:
        return
    offsets = tokenizer(lines, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    for line, places in zip(lines, offsets, strict=True):
        cuts = [0, *(places[first][0] for first in range(max_tokens, len(places), max_tokens)), len(line)]
        for number, (begin, end) in enumerate(pairwise(cuts)):
            yield line[begin:end], min(max_tokens, len(places) - number * max_tokens)

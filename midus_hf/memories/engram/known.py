"""N-grams of texts, numbered as in memories with a table of known n-grams."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from midus_hf.memories.engram.options import LONGEST, MOST_TOKENS, NgramOptions
from midus_hf.ops.engram import known_rows, ngram_keys, numbered, windows
from midus_hf.sources.progress import show_progress
from midus_hf.sources.tokenizers import without_suffix_tokens

# Replaces a removed n-gram in a table: larger than all n-grams of texts.
TAKEN_OUT = MOST_TOKENS**LONGEST - 1

_TEXTS_AT_ONCE = 1000


class TextKeys(NamedTuple):
    """N-grams that end at each token of some texts, one text after the other.

    `keys`, `[T, orders]`, int64, are 0 where a text has fewer tokens up to this one; `texts`, `[T]`, int64, has the index of each
    token's text among all texts; `ids` are the tokens of each of these texts.
    """

    keys: torch.Tensor
    texts: torch.Tensor
    ids: list[list[int]]


def keys_of_texts(
    texts: Sequence[str], tokenizer: Any, options: NgramOptions, token_numbers: torch.Tensor | None = None
) -> Iterator[TextKeys]:
    """Yield the n-grams of texts of the orders of a memory, a thousand texts at a time; none reaches past the end of its text.

    `token_numbers`, `[V]`, int64, are the same for tokens of similar text, by default the ids.
    """
    starts, tokenizer = range(0, len(texts), _TEXTS_AT_ONCE), without_suffix_tokens(tokenizer)
    for first in show_progress(starts, desc="reading n-grams", unit="k texts", leave=False):
        part = list(texts[first : first + _TEXTS_AT_ONCE])
        ids = tokenizer(part, verbose=False)["input_ids"]
        lengths = torch.tensor([len(each) for each in ids])
        text = torch.arange(len(ids)).repeat_interleave(lengths)
        tokens = torch.tensor([token for each in ids for token in each], dtype=torch.int64)
        around = windows(numbered(tokens, token_numbers).unsqueeze(0), options.max_order, text.unsqueeze(0))[0]
        keys = torch.stack([ngram_keys(around, order, MOST_TOKENS) for order in options.orders], dim=-1)
        yield TextKeys(keys, text + first, ids)


def known_ngrams(texts: Iterator[TextKeys], least_texts: int = 1) -> torch.Tensor:
    """Return the n-grams that occur in at least a number of texts, `[N]`, int64, ascending."""
    known, counts = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    for part in texts:
        keys, order = part.keys.flatten().sort(stable=True)  # of equal keys, texts are ascending
        pairs = torch.stack([keys, part.texts.repeat_interleave(part.keys.shape[1])[order]])
        is_new = torch.cat([keys[:1] > 0, (pairs[:, 1:] != pairs[:, :-1]).any(0) & (keys[1:] > 0)])
        new, in_texts = keys[is_new].unique_consecutive(return_counts=True)
        known, places = torch.cat([known, new]).unique(return_inverse=True)
        counts = torch.zeros_like(known).index_add(0, places, torch.cat([counts, in_texts]))
    return known[counts >= least_texts]


class NgramTable(NamedTuple):
    """The n-grams that a memory knows: `[N]`, int64, ascending, with `TAKEN_OUT` at the end; and token numbers."""

    memory: str
    options: NgramOptions
    ngrams: torch.Tensor
    token_numbers: torch.Tensor | None

    @property
    def num_known(self) -> int:
        return int((self.ngrams < TAKEN_OUT).sum())

    def keys_of(self, texts: Sequence[str], tokenizer: Any) -> Iterator[TextKeys]:
        return keys_of_texts(texts, tokenizer, self.options, self.token_numbers)

    def reads(self, keys: torch.Tensor) -> torch.Tensor:
        """Return for each token whether it reads a row, `[T]`, bool, from keys `[T, orders]`."""
        return (known_rows(keys, self.ngrams) > 0).any(-1)

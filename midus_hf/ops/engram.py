"""Rows of tables by the n-grams that end at each token: hashed, or looked up among known n-grams."""

from collections.abc import Sequence

import torch
from torch import Tensor

NO_TOKEN = 0  # number of a place in a window that holds no token: before the beginning of a document, or padding


def numbered(ids: Tensor, known: Tensor | None = None) -> Tensor:
    """Return the number of each token, from 1, the same for equivalent tokens, shaped as `ids`, int64.

    `known` `[V]` has the number of each id less 1; ids that were added later keep their id. Default: all do.
    """
    if known is not None:
        ids = torch.where(ids < len(known), known[ids.clamp(max=len(known) - 1)], ids)
    return ids + 1


def windows(tokens: Tensor, size: int, document: Tensor | None = None) -> Tensor:
    """Return each token with the tokens before it, the token itself first: `[B, T, size]`, int64.

    Args:
        tokens: `[B, T]`, int64, numbers of tokens from 1; `NO_TOKEN` for padding.
        size: Number of tokens per window; `NO_TOKEN` fills places before the row or in another document.
        document: `[B, T]`, number of the document of each token. Default: a row is one document.
    """
    length = tokens.shape[1]
    places = []
    for back in range(size):
        shifted = torch.nn.functional.pad(tokens, (back, 0))[:, :length]
        if document is not None and back:
            same = torch.nn.functional.pad(document, (back, 0), value=-1)[:, :length] == document
            shifted = torch.where(same, shifted, NO_TOKEN)
        places.append(shifted)
    return torch.stack(places, dim=-1)


def hashed_rows(around: Tensor, order: int, multipliers: Sequence[int], moduli: Sequence[int]) -> Tensor:
    """Return a row per hash head for each n-gram, `[B, T, heads]`, int64 (Engram, section 2.2).

    It is the xor of odd multiples, modulo a prime (arXiv 2601.07372).

    Args:
        around: `[B, T, n]`, as `windows` returns them.
        order: Number of tokens per n-gram, at most n.
        multipliers: An odd number per place of the window, whose products with all tokens are below 2^63.
        moduli: Number of rows of each hash head.
    """
    mixed = around[..., 0] * multipliers[0]
    for back in range(1, order):
        mixed = mixed ^ (around[..., back] * multipliers[back])
    return torch.stack([mixed % modulus for modulus in moduli], dim=-1)


def ngram_keys(around: Tensor, order: int, base: int) -> Tensor:
    """Return an integer per n-gram of `around`, unique across n-grams of all orders: `[B, T]`, int64.

    It is 0 where the document has fewer than `order` tokens up to this one. `base` is above all numbers of tokens, and `base ** n` at
    most 2^63.
    """
    key = torch.zeros_like(around[..., 0])
    for back in reversed(range(order)):
        key = key * base + around[..., back]
    return torch.where((around[..., :order] != NO_TOKEN).all(-1), key, 0)


def known_rows(keys: Tensor, table: Tensor) -> Tensor:
    """Return the row, int64, of each of the keys of `ngram_keys` in a table, and row 0 for all others.

    The table `[N]`, int64, has the ascending keys of the known n-grams, in rows 1 to N.
    """
    if not len(table):
        return torch.zeros_like(keys)
    nearest = torch.searchsorted(table, keys).clamp(max=len(table) - 1)
    return torch.where(table[nearest] == keys, nearest + 1, 0)

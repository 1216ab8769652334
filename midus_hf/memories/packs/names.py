"""Names as sequences of token ids: which name ends at each token of a text, and which packs a token reads."""

from typing import Any, NamedTuple

import torch


class NameTable(NamedTuple):
    """Names in a trie that is read from the last token of a name to the first.

    Node 0 is the root, and node i + 1 the one that edge i leads to.

    Args:
        edges: `[E]`, int64, ascending: the node that an edge leaves, times V + 1, plus the token.
        ends: `[E]`, int64: number from 1 of the entry whose name begins at the node, 0 for none.
        vocab_size: V. Every other id, such as -1 for padding, is part of no name.
        longest: Tokens of the longest name.
    """

    edges: torch.Tensor
    ends: torch.Tensor
    vocab_size: int
    longest: int

    def entries(self, ids: torch.Tensor, document: torch.Tensor | None = None) -> torch.Tensor:
        """Return the entry whose name ends at each token, `[B, T]`, int64, from 1; 0 for none. The longest name wins.

        Args:
            ids: `[B, T]`, int64.
            document: `[B, T]`, number of the document of each token, since no name reaches into another. Default: a row is one.
        """
        found = torch.zeros_like(ids)
        if not len(self.edges):
            return found
        known = (ids >= 0) & (ids < self.vocab_size)
        ids = torch.where(known, ids, self.vocab_size)
        node, is_open = torch.zeros_like(ids), torch.ones_like(known)
        for back in range(min(self.longest, ids.shape[1])):
            token = torch.full_like(ids, self.vocab_size)
            token[:, back:] = ids[:, : ids.shape[1] - back]
            if document is not None and back:
                is_open[:, back:] &= document[:, back:] == document[:, :-back]
            key = node * (self.vocab_size + 1) + token
            edge = torch.searchsorted(self.edges, key).clamp(max=len(self.edges) - 1)
            is_open = is_open & (self.edges[edge] == key)
            if not is_open.any():
                break
            node = torch.where(is_open, edge + 1, 0)
            found = torch.where(is_open & (self.ends[edge] > 0), self.ends[edge], found)
        return found


# A name that is open already and stands again within so many positions leaves its pack where it is, so that texts that repeat a name
# do not read the pack at each place.
_STAYS = 32


class Openings(NamedTuple):
    """Openings of packs as numbers: the position of the name's last token and the entry, together in one.

    Args:
        num_entries: Number of entries. They are counted from 1, and an opening of 0 is none.
    """

    num_entries: int

    def number(self, entry: int, position: int) -> int:
        """Return the number of an opening."""
        return (position + 1) * (self.num_entries + 1) + entry

    def entry(self, opening: Any) -> Any:
        """Return the entry of an opening, or of each in a tensor; 0 for none."""
        return opening % (self.num_entries + 1)

    def position(self, opening: Any) -> Any:
        """Return the position of the name's last token, of one opening or of each in a tensor; -1 for none."""
        return opening // (self.num_entries + 1) - 1

    def of_tokens(
        self,
        found: torch.Tensor,
        positions: torch.Tensor,
        most: int,
        before: torch.Tensor | None = None,
        document: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the openings whose packs each token reads, `[B, T, most]`, int64, the latest first; 0 for none.

        Args:
            found: `[B, T]`, the entry whose name ends at each token, 0 for none.
            positions: `[B, T]`, positions of the tokens.
            most: Entries that a token reads at most.
            before: `[B, most]`, the openings that the token before the first one read. Default: none.
            document: `[B, T]`, number of the document of each token, at whose beginning nothing is open. Default: a row is one.
        """
        batch, tokens = found.shape
        opened = found.new_zeros(batch, tokens, most)
        if before is not None:
            opened += before[:, None]
        changes = found > 0
        if document is not None:
            changes[:, 1:] |= document[:, 1:] != document[:, :-1]
        for row, token in changes.nonzero().tolist():
            begins = document is not None and token > 0 and bool(document[row, token] != document[row, token - 1])
            entry, position = int(found[row, token]), int(positions[row, token])
            open_now = [] if begins else [each for each in opened[row, token].tolist() if each]
            now = [each for each in open_now if self.entry(each) != entry]
            if entry:
                stays = [each for each in open_now if self.entry(each) == entry]
                if not stays or position - self.position(stays[0]) >= _STAYS:
                    stays = [self.number(entry, position)]
                now = stays + now
            opened[row, token:] = found.new_tensor((now + [0] * most)[:most])
        return opened

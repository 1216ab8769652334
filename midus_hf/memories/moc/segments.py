"""Segments of tokens that read the same chapters, and attention over many segments at once."""

import dataclasses
from collections.abc import Callable

import torch

from midus_hf.ops.moc.op import min_together

# Numbers of segments: a slice, or `[S]`, int64.
Numbers = slice | torch.Tensor

# Function that reads for tokens `[S, L, ...]`, one row for each of the numbered segments, and returns `[S, L, ...]`.
Read = Callable[[torch.Tensor, Numbers], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Segments:
    """Segments of a pass in any order, so that every token reads separately.

    Args:
        segment_of_token: `[B, T]`, int64, number of the segment that each token belongs to, from 0 to N - 1.
    """

    segment_of_token: torch.Tensor

    def read(self, tokens: torch.Tensor, read: Read) -> torch.Tensor:
        """Read for tokens `[B, T, ...]`, each in its segment, and return `[B, T, ...]`."""
        alone = tokens.flatten(0, 1).unsqueeze(1)  # [B * T, 1, ...]
        return read(alone, self.segment_of_token.flatten()).squeeze(1).unflatten(0, self.segment_of_token.shape)


@dataclasses.dataclass(frozen=True)
class EqualSegments(Segments):
    """Segments of equal length that follow each other.

    Args:
        length: Number of tokens per segment.
    """

    length: int

    def read(self, tokens: torch.Tensor, read: Read) -> torch.Tensor:
        by_segment = tokens.reshape(-1, self.length, *tokens.shape[2:])
        output = read(by_segment, slice(None))
        return output.reshape(*tokens.shape[:2], *output.shape[2:])


@dataclasses.dataclass(frozen=True)
class PaddedSegments(Segments):
    """Segments of different lengths, which are padded to equal length.

    Args:
        numbers: `[S]`, int64, number of the segment of each row; several rows may have one segment.
        room: L, number of tokens per row.
        places: `[B * T]`, int64, position of each token among the S * L; S * L for padding, which reads nothing.
    """

    numbers: torch.Tensor
    room: int
    places: torch.Tensor

    def read(self, tokens: torch.Tensor, read: Read) -> torch.Tensor:
        flat = tokens.flatten(0, 1)
        count = len(self.numbers) * self.room
        padded = flat.new_zeros(count + 1, *flat.shape[1:]).index_copy(0, self.places, flat)[:count]
        output = read(padded.unflatten(0, (len(self.numbers), self.room)), self.numbers).flatten(0, 1)
        with_nothing = torch.cat([output, output.new_zeros(1, *output.shape[1:])])
        return with_nothing.index_select(0, self.places).unflatten(0, tokens.shape[:2])


def padded(
    segment_of_token: torch.Tensor,
    first_tokens: torch.Tensor,
    room: int,
    *,
    alike: torch.Tensor | None = None,
    alike_room: int = 0,
    shrinks: bool = False,
) -> Segments:
    """Lay segments of consecutive tokens side by side, padded to equal length.

    Args:
        segment_of_token: `[B, T]`, int64, number of the segment that each token belongs to; -1 for padding.
        first_tokens: `[N]`, int64, position of each segment's first token among the B * T tokens.
        room: Largest number of tokens in a segment.
        alike: `[B, T]`, bool, the tokens of segment 0, which need not be consecutive. Default: segment 0 is like all others.
        alike_room: Largest number of tokens in segment 0, which gets as many rows as these tokens fill. Default: 0.
        shrinks: Whether to shrink `room` to the longest segment, which waits for the device. Default: false.

    Returns:
        The segments; plain `Segments` if `room` is too small for padding to pay off.
    """
    flat = segment_of_token.flatten()
    every = torch.arange(len(flat), device=flat.device)
    if shrinks:
        at_once = flat if alike is None else flat.masked_fill(alike.flatten(), -1)
        longest = int((every - first_tokens[flat.clamp(min=0)]).masked_fill(at_once < 0, 0).max()) + 1
        room = min(room, max(longest, min_together()))  # shorter rows would be read token by token
    if room < min_together():
        return Segments(segment_of_token.clamp(min=0))
    copies, skipped = -(-alike_room // room), 0 if alike is None else 1
    alone = torch.arange(skipped, len(first_tokens), device=flat.device)
    numbers = torch.cat([alone.new_zeros(copies), alone])
    places = (copies + flat - skipped) * room + every - first_tokens[flat.clamp(min=0)]
    if alike is not None:
        places = torch.where(alike.flatten(), alike.flatten().cumsum(0) - 1, places)
    places = torch.where(flat >= 0, places, len(numbers) * room)
    return PaddedSegments(segment_of_token.clamp(min=0), numbers, room, places)

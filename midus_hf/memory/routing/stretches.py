"""Stretches of tokens that read the same chapters, and attention over many stretches at once."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from midus_hf.ops.chapters.op import fewest_together

# Numbers of stretches: a slice, or `[S]`, int64.
Numbers = slice | torch.Tensor

# Function that reads for tokens `[S, L, ...]`, one row for each of the numbered stretches, and returns `[S, L, ...]`.
Read = Callable[[torch.Tensor, Numbers], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Stretches:
    """Stretches of a pass in any order, so that every token reads by itself.

    Args:
        of_token: `[B, T]`, int64, number of the stretch that each token belongs to, from 0 to N - 1.
    """

    of_token: torch.Tensor

    def read(self, tokens: torch.Tensor, read: Read) -> torch.Tensor:
        """Read for tokens `[B, T, ...]`, each in its stretch, and return `[B, T, ...]`."""
        alone = tokens.flatten(0, 1).unsqueeze(1)  # [B * T, 1, ...]
        return read(alone, self.of_token.flatten()).squeeze(1).unflatten(0, self.of_token.shape)


@dataclasses.dataclass(frozen=True)
class EqualStretches(Stretches):
    """Stretches of equal length that follow each other.

    Args:
        length: Number of tokens per stretch.
    """

    length: int

    def read(self, tokens: torch.Tensor, read: Read) -> torch.Tensor:
        by_stretch = tokens.reshape(-1, self.length, *tokens.shape[2:])
        output = read(by_stretch, slice(None))
        return output.reshape(*tokens.shape[:2], *output.shape[2:])


@dataclasses.dataclass(frozen=True)
class RowChunks(Stretches):
    """Chunks of rows that begin in this pass. Stretch 0 is the beginning of all rows; the chunks of one row after another follow.

    Args:
        first: Number of tokens in the beginning of a row.
        size: Number of tokens per chunk. A row's chunk 0 holds the tokens from `first` to `size`; it is absent if `first` is `size`.
    """

    first: int
    size: int

    def read(self, tokens: torch.Tensor, read: Read) -> torch.Tensor:
        batch, num_tokens, *width = tokens.shape
        beginning = tokens[:, : self.first]
        left_out = 0 if self.first < self.size else self.size
        of_chunks = tokens[:, left_out:] if num_tokens > self.first else tokens[:, :0]
        length = min(self.size, max(of_chunks.shape[1], beginning.shape[1]))
        chunks = -(-of_chunks.shape[1] // length)
        # Tokens of the beginning are read a second time, with the first chunk, so that all chunks have equal length.
        behind = _filled(of_chunks, 1, chunks * length).reshape(batch * chunks, length, *width)
        copies = -(-batch * beginning.shape[1] // length)  # number of rows that the tokens of stretch 0 fill
        of_all_rows = _filled(beginning.flatten(0, 1), 0, copies * length).reshape(copies, length, *width)
        numbers = torch.arange(1 - copies, 1 + batch * chunks, device=tokens.device).clamp(min=0)
        output = read(torch.cat([of_all_rows, behind]), numbers)
        of_beginning = output[:copies].flatten(0, 1)[: batch * beginning.shape[1]]
        parts = [of_beginning.unflatten(0, beginning.shape[:2])]
        if chunks:
            by_row = output[copies:].unflatten(0, (batch, chunks)).flatten(1, 2)
            parts.append(by_row[:, self.first - left_out : num_tokens - left_out])
        return torch.cat(parts, dim=1)


@dataclasses.dataclass(frozen=True)
class GroupedStretches(Stretches):
    """Stretches in groups of similar length; within a group, shorter stretches are filled up with arbitrary tokens.

    Args:
        numbers: For each group, `[S]`, the numbers of the group's stretches.
        lengths: For each group, L, the number of tokens that each stretch has room for.
        tokens: `[P]`, int64, the tokens of all groups, one group after another, as positions among the B * T tokens.
        places: `[B * T]`, int64, position of each token among the P; P for padding, which reads nothing.
    """

    numbers: Sequence[torch.Tensor]
    lengths: Sequence[int]
    tokens: torch.Tensor
    places: torch.Tensor

    def read(self, tokens: torch.Tensor, read: Read) -> torch.Tensor:
        rows = tokens.flatten(0, 1)
        taken = _Taken.apply(rows, self.tokens, self.places)
        outputs, first = [], 0
        for numbers, length in zip(self.numbers, self.lengths, strict=True):
            end = first + len(numbers) * length
            outputs.append(read(taken[first:end].unflatten(0, (len(numbers), length)), numbers).flatten(0, 1))
            first = end
        nothing = outputs[0].new_zeros(1, *outputs[0].shape[1:])
        read_rows = torch.cat([*outputs, nothing])
        of_token = _PutBack.apply(read_rows, self.places)
        return of_token.unflatten(0, tokens.shape[:2])


def grouped(
    of_token: torch.Tensor,
    first_tokens: torch.Tensor,
    room: int,
    *,
    alike: torch.Tensor | None = None,
    alike_room: int = 0,
    by_length: bool = False,
) -> Stretches:
    """Put stretches of consecutive tokens into groups.

    Args:
        of_token: `[B, T]`, int64, number of the stretch that each token belongs to; -1 for padding.
        first_tokens: `[N]`, int64, position of each stretch's first token among the B * T tokens.
        room: Largest number of tokens in a stretch.
        alike: `[B, T]`, bool, the tokens of stretch 0, which need not be consecutive. Default: stretch 0 is like all others.
        alike_room: Largest number of tokens in stretch 0. Default: 0.
        by_length: Whether to sort stretches by length, so that groups need less filling; this waits for the device. Default: false.

    Returns:
        The grouped stretches; plain `Stretches` if `room` is too small for groups to pay, or all tokens are padding.
    """
    real, device = of_token.flatten() >= 0, of_token.device
    numbers = of_token.flatten().clamp(min=0)
    if room < fewest_together():
        return Stretches(numbers.view(of_token.shape))
    every = torch.arange(len(numbers), device=device)  # [B * T]
    several = len(first_tokens)
    skipped = 0 if alike is None else 1
    lengths = [room]
    while by_length and lengths[-1] >= 2 * fewest_together():
        lengths.append(-(-lengths[-1] // 2))
    members = torch.arange(skipped, several, device=device)
    sizes = [several - skipped]
    if by_length:
        tokens_of = torch.zeros(several, dtype=torch.int64, device=device).index_add_(0, numbers, real.long())
        rooms = torch.tensor(lengths, device=device)
        group = (tokens_of[skipped:, None] <= rooms).sum(1).clamp(min=1) - 1  # the last group with enough room
        order = group.argsort(stable=True)
        members, sizes = members[order], torch.bincount(group, minlength=len(lengths)).tolist()
    parts: list[torch.Tensor] = []
    tokens: list[torch.Tensor] = []
    kept_lengths: list[int] = []
    firsts, first = torch.zeros_like(first_tokens), 0
    # Number of rows that the tokens of stretch 0 fill, which are read with the longest stretches.
    copies = -(-alike_room // room)
    for length, of_group in zip(lengths, members.split(sizes), strict=True):
        copied = copies if first == 0 and not parts else 0
        if len(of_group) + copied == 0:
            continue
        starts = first + length * torch.arange(copied, copied + len(of_group), device=device)
        firsts = firsts.index_copy(0, of_group, starts)
        own = (first_tokens[of_group][:, None] + torch.arange(length, device=device)).flatten()
        if copied:
            assert alike is not None
            rank = torch.where(alike.flatten(), alike.flatten().cumsum(0) - 1, copied * length)
            listed = torch.zeros(copied * length + 1, dtype=torch.int64, device=device).scatter_(0, rank, every)
            of_group, own = torch.cat([of_group.new_zeros(copied), of_group]), torch.cat([listed[:-1], own])
        parts.append(of_group)
        kept_lengths.append(length)
        tokens.append(own)
        first += len(own)
    if not parts:  # nothing but padding
        return Stretches(numbers.view(of_token.shape))
    places = firsts[numbers] + every - first_tokens[numbers]
    if copies:
        assert alike is not None
        places = torch.where(alike.flatten(), alike.flatten().cumsum(0) - 1, places)
    places = torch.where(real, places, first)
    together = torch.cat(tokens).clamp(max=len(numbers) - 1)
    return GroupedStretches(numbers.view(of_token.shape), tuple(parts), tuple(kept_lengths), together, places)


def _filled(tokens: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Append zeros to tokens along a dimension, up to `length`."""
    missing = length - tokens.shape[dim]
    return torch.nn.functional.pad(tokens, (*(0, 0) * (tokens.dim() - dim - 1), 0, missing)) if missing else tokens


class _Taken(torch.autograd.Function):
    """Rows of a tensor in the order of groups. Apart from filling, each row is taken once, so its gradient is a single row."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        return rows.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        (places,) = ctx.saved_tensors
        nothing = gradient.new_zeros(1, *gradient.shape[1:])
        return torch.cat([gradient, nothing]).index_select(0, places), None, None


class _PutBack(torch.autograd.Function):
    """Rows in the order of tokens, without the rows that fill groups up; padding gets the last row."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.num_rows = len(rows)
        return rows.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        (places,) = ctx.saved_tensors
        rows = gradient.new_zeros(ctx.num_rows, *gradient.shape[1:])
        return rows.index_copy(0, places, gradient), None

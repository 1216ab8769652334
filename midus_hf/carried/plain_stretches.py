"""Stretches of tokens in a checkpoint's own code: all in one group, in which every stretch has room for equally many tokens."""

import dataclasses

import torch

from midus_hf.memory.routing.stretches import Read, Stretches


@dataclasses.dataclass(frozen=True)
class PaddedStretches(Stretches):
    """Stretches that are filled up to equal length.

    Args:
        numbers: `[S]`, int64, number of the stretch that each row of the group belongs to.
        room: L, number of tokens per row.
        places: `[B * T]`, int64, position of each token among the S * L; S * L for padding, which reads nothing.
    """

    numbers: torch.Tensor
    room: int
    places: torch.Tensor

    def read(self, tokens: torch.Tensor, read: Read) -> torch.Tensor:
        rows = tokens.flatten(0, 1)
        count = len(self.numbers) * self.room
        padded = rows.new_zeros(count + 1, *rows.shape[1:]).index_copy(0, self.places, rows)[:count]
        output = read(padded.unflatten(0, (len(self.numbers), self.room)), self.numbers).flatten(0, 1)
        with_nothing = torch.cat([output, output.new_zeros(1, *output.shape[1:])])
        return with_nothing.index_select(0, self.places).unflatten(0, tokens.shape[:2])


def grouped(
    of_token: torch.Tensor,
    first_tokens: torch.Tensor,
    room: int,
    *,
    alike: torch.Tensor | None = None,
    alike_room: int = 0,
    by_length: bool = False,
) -> Stretches:
    """Put stretches of consecutive tokens into one group.

    Args:
        of_token: `[B, T]`, int64, number of the stretch that each token belongs to; -1 for padding.
        first_tokens: `[N]`, int64, position of each stretch's first token among the B * T tokens.
        room: Largest number of tokens in a stretch.
        alike: `[B, T]`, bool, the tokens of stretch 0, which need not be consecutive. Default: stretch 0 is like all others.
        alike_room: Largest number of tokens in stretch 0, which gets as many rows as these tokens fill. Default: 0.
        by_length: Whether to shrink `room` to the longest stretch, which waits for the device. Default: false.
    """
    flat = of_token.flatten()
    within = torch.arange(len(flat), device=flat.device) - first_tokens[flat.clamp(min=0)]
    if by_length and alike is None and not torch.compiler.is_compiling():
        room = min(room, int(within.masked_fill(flat < 0, 0).max()) + 1)
    copies, skipped = -(-alike_room // room), 0 if alike is None else 1
    alone = torch.arange(skipped, len(first_tokens), device=flat.device)
    numbers = torch.cat([alone.new_zeros(copies), alone])
    places = (copies + flat - skipped) * room + within
    if alike is not None:
        places = torch.where(alike.flatten(), alike.flatten().cumsum(0) - 1, places)
    places = torch.where(flat >= 0, places, len(numbers) * room)
    return PaddedStretches(of_token.clamp(min=0), numbers, room, places)

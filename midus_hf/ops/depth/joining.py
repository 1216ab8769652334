"""What heads read of the depth, and how it is joined with what they read of the sequence."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from midus_hf.ops.depth.op import depth_attention


class Depth(NamedTuple):
    """Slots of the depth, the queries that read them, and how `joint_attention` weighs the result.

    Args:
        query: Query that is compared with the keys of the slots, `[B, H, T, d]`.
        keys: Key of each of n slots, `[B, K, T, d]`.
        values: Value of each slot, `[B, K, T, d]`.
        scaling: Factor of scores.
        softcap: Bound c of scores in `c * tanh(score / c)`. Default: None, no bound.
        gate: c of `joint_attention` per query head, `[H]`. Default: None, which stands for 1.
        added: Whether `joint_attention` adds (1 - c) times what heads read of the depth. Default: false.
    """

    query: torch.Tensor
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    scaling: float
    softcap: float | None = None
    gate: torch.Tensor | None = None
    added: bool = False

    def read(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what heads read `[B, H, T, d]`, the logarithms of their sums of exponentials `[B, H, T]`, and c `[B, H, T]`."""
        read, lse = depth_attention(self.query, self.keys, self.values, self.scaling, self.softcap)
        gate = lse.new_ones(read.shape[1]) if self.gate is None else self.gate
        return read, lse, gate[:, None].expand_as(lse)

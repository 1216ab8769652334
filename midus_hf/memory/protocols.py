"""What tools ask of a memory: whichever module has these methods can be counted and balanced."""

from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class RetrievesSlots(Protocol):
    """A memory whose heads choose slots: its usage can be counted."""

    num_heads: int
    """H."""
    num_slots: int
    """N, the slots that each head chooses among."""

    def retrieve(self, read: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights, float32, and slots, int64, that each head reads, both `[B, T, H, k]`, for what the memory reads; nothing is
        changed."""


@runtime_checkable
class ScoresSubKeys(Protocol):
    """A memory whose queries are compared with sub-keys: their selection can be balanced."""

    k: int
    """Sub-keys selected per head and token."""
    training: bool

    def queries(self, read: torch.Tensor, track_statistics: bool = True) -> torch.Tensor:
        """What each head asks with, `[B, T, H, query_width]`; statistics are left as they are unless `track_statistics`."""

    def sub_key_scores(self, query: torch.Tensor) -> list[torch.Tensor]:
        """Scores `[..., H, n]` of each side's sub-keys, float32 at least, for queries `[..., H, query_width]`."""

    def weigh(self, scores: torch.Tensor) -> torch.Tensor:
        """Probabilities of scores."""

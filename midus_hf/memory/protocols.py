"""Protocols by which tools read memories: a module with these methods can be counted, balanced and inspected."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from midus_hf.memory.memory_state import MemoryState
from midus_hf.memory.routing.pooling import Routing
from midus_hf.memory.routing.token_places import TokenPlaces


@runtime_checkable
class RetrievesSlots(Protocol):
    """A memory whose heads choose slots, so that the use of slots can be counted."""

    #: H, number of heads.
    num_heads: int
    #: N, number of slots that each head chooses from.
    num_slots: int

    def retrieve(self, read: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights, float32, and the slots, int64, that each head reads for the memory's input, both `[B, T, H, k]`;
        change nothing."""


@runtime_checkable
class GivesRowGradients(Protocol):
    """A memory that reads few rows of large tables, whose gradients may be sparse tensors of these rows; training may set it."""

    #: Whether the gradient is sparse.
    sparse_gradient: bool


@runtime_checkable
class HostsTables(Protocol):
    """A model whose memories may share tables."""

    def table_readers(self) -> Iterator[tuple[nn.Module, Mapping[str, torch.Tensor]]]:
        """Yield each memory that reads shared tables, with these tables by name."""


@runtime_checkable
class ReadsChapters(Protocol):
    """A memory whose tokens read chapters that a router chose, so that reads and contents of chapters can be inspected."""

    #: C, number of chapters, including shared chapters.
    num_chapters: int
    #: S, number of shared chapters: the first S chapters, which every token reads.
    num_shared: int

    def route(
        self,
        hidden_states: torch.Tensor,
        tokens: TokenPlaces | None = None,
        state: MemoryState | None = None,
        prompt_mask: torch.Tensor | None = None,
    ) -> Routing:
        """Choose chapters for the memory's input `[B, T, D]`, and change nothing."""


@runtime_checkable
class AttendsToDepth(Protocol):
    """A memory whose heads read slots of earlier layers, so that reads of each slot can be recorded."""

    def attend(self, query: torch.Tensor, **depth: Any) -> Any:
        """Attend to the sequence and the slots, as `DepthAttention.attend` does."""

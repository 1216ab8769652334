"""What tools ask of a memory: whichever module has these methods can be counted, balanced and looked into."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from midus_hf.memory.memory_state import MemoryState
from midus_hf.memory.routing.pooling import Routing
from midus_hf.memory.routing.token_places import TokenPlaces
from midus_hf.memory.tables import TableReading


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
class AddsSlots(RetrievesSlots, Protocol):
    """A memory of whose slots it can be told what each adds."""

    values_by_head: bool
    """Whether what a slot adds depends on the head that reads it."""

    def slot_outputs(
        self, slots: torch.Tensor, head: int, *, tables: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """What each of slots `[S]` adds where a head reads it alone, with a weight of 1 and gates left out, `[S, E, D]`: for each of
        E projections that it may be read through."""


@runtime_checkable
class ReadsFewRows(Protocol):
    """A memory that reads few rows of large tables, those of its values: training may change how."""

    table_reading: TableReading
    """How it does."""


@runtime_checkable
class GivesRowGradients(Protocol):
    """What may give a large table a gradient of the rows that were read alone."""

    sparse_gradient: bool
    """Whether it does."""


@runtime_checkable
class HostsTables(Protocol):
    """A model whose memories may share tables."""

    def table_readers(self) -> Iterator[tuple[nn.Module, Mapping[str, torch.Tensor]]]:
        """Each memory that reads shared tables, and these by name."""


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


@runtime_checkable
class ReadsChapters(Protocol):
    """A memory whose tokens read chapters that a router chose: what it reads can be told, and what chapters hold."""

    num_chapters: int
    """C, shared ones included."""
    num_shared: int
    """S, the first chapters, which every token reads."""

    def route(
        self,
        hidden_states: torch.Tensor,
        tokens: TokenPlaces | None = None,
        state: MemoryState | None = None,
        prompt_mask: torch.Tensor | None = None,
    ) -> Routing:
        """Choose chapters for what the memory reads, `[B, T, D]`; nothing is changed."""

    def attention_mass(
        self, hidden_states: torch.Tensor, routing: Routing, *, tables: Mapping[str, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Chapters `[B, T, S + k]` of each token, and the share `[B, T, S + k]` of its attention that each gets."""

    def token_outputs(
        self, chapters: torch.Tensor, *, tables: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """What each memory token of chapters `[C']` adds where it is all that is read, `[C', M, D]`."""


@runtime_checkable
class AttendsToDepth(Protocol):
    """A memory whose heads read slots of earlier layers: what they read of each can be recorded."""

    def attend(self, query: torch.Tensor, **depth: Any) -> Any:
        """What heads read of the sequence and the slots."""

"""Layers of Mixture of Chapters on their own, in float64, whose every tensor acts."""

from typing import Any

import torch
from memory.chapter_loops import Read, read_by_loops

from midus_hf.config.model_sizes import ModelSizes
from midus_hf.memories.chapters.layer import Chapters
from midus_hf.memories.chapters.options import ChaptersOptions
from midus_hf.memories.hosting.token_places import TokenPlaces
from midus_hf.memories.module import build_memory

WIDTH, HEADS = 8, 2
SMALL: dict[str, Any] = {"memory_tokens": 16, "chapters": 8, "k": 2, "chunk_size": 3, "share": "none"}


def layer(**options: Any) -> Chapters:
    """A small layer that has a bank of its own unless the options say otherwise."""
    torch.manual_seed(0)
    sizes = ModelSizes(hidden_size=WIDTH, num_heads=HEADS, head_dim=WIDTH // HEADS)
    made = build_memory(ChaptersOptions(**{**SMALL, **options}), sizes).double()
    fill(made)
    return made


def fill(module: torch.nn.Module, seed: int = 5) -> None:
    """Give every parameter values of the size of 1, so that routers choose with weights that differ."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def states(batch: int = 2, tokens: int = 8, seed: int = 1, width: int = WIDTH) -> torch.Tensor:
    """Hidden states `[B, T, D]` that want a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, tokens, width, dtype=torch.float64, generator=generator, requires_grad=True)


def whole_rows(hidden_states: torch.Tensor) -> list[list[list[int]]]:
    """One document per row, without padding."""
    return [[list(range(hidden_states.shape[1]))] for _ in range(hidden_states.shape[0])]


def by_loops(
    memory: Chapters,
    hidden_states: torch.Tensor,
    documents: list[list[list[int]]] | None = None,
) -> dict[tuple[int, int], Read]:
    """What the loops read with the tensors of a layer."""
    return read_by_loops(
        memory.options,
        memory.num_heads,
        dict(memory.named_parameters()),
        hidden_states,
        whole_rows(hidden_states) if documents is None else documents,
    )


def places_of(mask: list[list[int]]) -> TokenPlaces:
    """The places of tokens under a mask, as a model finds them."""
    return TokenPlaces(torch.tensor(mask, dtype=torch.bool))


def indices(mask: list[list[int]]) -> list[list[list[int]]]:
    """The one document of each row under a mask."""
    return [[[index for index, is_real in enumerate(row) if is_real]] for row in mask]


def assert_reads(output: torch.Tensor, reads: dict[tuple[int, int], Read]) -> None:
    """A layer gave each token what the loops read for it."""
    assert reads
    for (row, index), read in reads.items():
        torch.testing.assert_close(
            output[row, index], read.added, rtol=1e-9, atol=1e-10, msg=lambda text, at=(row, index): f"{at}: {text}"
        )

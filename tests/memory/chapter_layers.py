"""Small layers of Mixture of Chapters in float64, and what loops over rows and tokens read with their tensors.

Loops are written from equations 1 to 4 and algorithm 1 of the paper, and from what the options say of weights and of what is pooled.
Autograd gives gradients of the loops as well.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from midus_hf.config.declared_tensors import ModelSizes
from midus_hf.memories.hosting.parts import TokenPlaces
from midus_hf.memories.moc.layer import MocMemory
from midus_hf.memories.moc.options import MocOptions
from midus_hf.memories.module import build_memory

WIDTH, HEADS = 8, 2
SMALL: dict[str, Any] = {"memory_tokens": 16, "chapters": 8, "k": 2, "chunk_size": 3, "share": "none"}
EPS = 1e-6


def layer(**options: Any) -> MocMemory:
    """A small layer that has a bank of its own unless the options say otherwise, whose every tensor acts."""
    torch.manual_seed(0)
    sizes = ModelSizes(hidden_size=WIDTH, num_heads=HEADS, head_dim=WIDTH // HEADS)
    made = build_memory(MocOptions(**{**SMALL, **options}), sizes).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return made


def states(batch: int = 2, tokens: int = 8, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, tokens, WIDTH, dtype=torch.float64, generator=generator, requires_grad=True)


def places_of(mask: list[list[int]]) -> TokenPlaces:
    return TokenPlaces(torch.tensor(mask, dtype=torch.bool))


def indices(mask: list[list[int]]) -> list[list[list[int]]]:
    """The one document of each row under a mask."""
    return [[[index for index, is_real in enumerate(row) if is_real]] for row in mask]


@dataclass(frozen=True)
class Read:
    """What the loops found for one token: its router logits, the routed chapters, best first, and what is added to it."""

    logits: torch.Tensor
    chosen: list[int]
    added: torch.Tensor


def by_loops(
    memory: MocMemory, hidden_states: torch.Tensor, documents: list[list[list[int]]] | None = None
) -> dict[tuple[int, int], Read]:
    """What each token gets, by row and index; each row has documents of indices, padding in none, by default one of all tokens."""
    options, reads = memory.options, {}
    first_chunk = min(8, options.chunk_size)
    for row, of_row in enumerate(documents or [[list(range(hidden_states.shape[1]))]] * len(hidden_states)):
        of_tokens = hidden_states[row]
        for document in of_row:
            for position, index in enumerate(document):
                begin = 0
                for other in range(position + 1):
                    if other == first_chunk or (other > first_chunk and other % options.chunk_size == 0):
                        begin = other
                pooled_over = {"token": [index], "sequence": document, "chunk": document[:begin]}[options.routing]
                if len(pooled_over) > 1:
                    pooled_over = [other for other in pooled_over if other != document[0]]
                pooled = normalised(of_tokens[pooled_over]).clamp(-1, 1).sum(0) / max(1, len(pooled_over))
                reads[row, index] = read_by_loops(memory, of_tokens[index], pooled)
    return reads


def normalised(states: torch.Tensor) -> torch.Tensor:
    return states / (states.square().mean(-1, keepdim=True) + EPS).sqrt()


def read_by_loops(memory: MocMemory, state: torch.Tensor, pooled: torch.Tensor) -> Read:
    """What a token reads whose chapters a pooled state chooses."""
    options, tensors, heads = memory.options, dict(memory.named_parameters()), (memory.num_heads, -1)
    logits = tensors["router_weight"] @ pooled + tensors["router_bias"]
    probabilities = logits.softmax(0)
    routed = range(options.shared_chapters, options.chapters)
    chosen = sorted(routed, key=lambda chapter: -probabilities[chapter].item())[: options.k]
    total = sum(probabilities[chapter] for chapter in chosen)
    weights = [(chapter, torch.ones(())) for chapter in range(options.shared_chapters)]
    weights += [(chapter, options.routed_scale * probabilities[chapter] / total) for chapter in chosen]
    all_weights = sum(weight for _, weight in weights)

    chapters = tensors["bank"].split(options.chapter_tokens)
    tokens = torch.cat([normalised(chapters[chapter]) * weight / all_weights for chapter, weight in weights])
    keys = (tokens @ tensors["key_projection.weight"].T).unflatten(-1, heads)  # [M, H, d]
    values = (tokens @ tensors["value_projection.weight"].T).unflatten(-1, heads)
    query = (tensors["query_projection.weight"] @ (normalised(state) * tensors["norm_weight"])).unflatten(0, heads)
    attention = (torch.einsum("hd,mhd->hm", query, keys) / math.sqrt(query.shape[1])).softmax(-1)
    read = torch.einsum("hm,mhd->hd", attention, values).flatten()
    return Read(logits, chosen, tensors["output_projection.weight"] @ read)


def assert_reads(output: torch.Tensor, reads: dict[tuple[int, int], Read]) -> None:
    assert reads
    for (row, index), read in reads.items():
        torch.testing.assert_close(output[row, index], read.added, rtol=1e-9, atol=1e-10)


def gradients_of(output: torch.Tensor, wanted: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The gradients of a random sum of an output, zero where it does not depend on a tensor."""
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return torch.autograd.grad((output * weights).sum(), wanted, allow_unused=True, materialize_grads=True)

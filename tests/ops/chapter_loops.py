"""Cross-attention to chapters by loops over tokens, heads and memory tokens, and small arguments to judge the tensor code with."""

import itertools
import math
from collections.abc import Callable

import torch

CHAPTERS, MEMORY_TOKENS, WIDTH = 5, 3, 4


def made(
    segments: int = 6, length: int = 2, chosen: int = 2, heads: int = 4, dtype: torch.dtype = torch.float64
) -> dict[str, torch.Tensor]:
    """Arguments of the op, each of which wants a gradient where it has one."""
    generator = torch.Generator().manual_seed(10 * length + 100 * segments)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    table = (CHAPTERS, MEMORY_TOKENS, heads, WIDTH)
    order = torch.rand(segments, CHAPTERS, generator=generator).argsort(-1)
    return {
        "query": normal(segments, length, heads, WIDTH),
        "keys": normal(*table),
        "values": normal(*table),
        "chapters": order[:, :chosen],
        "scales": normal(segments, chosen),
    }


# Arguments that every body must take, made of others.
ODD: dict[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    "all tokens name one chapter, and twice": lambda given: (
        given | {"chapters": torch.full_like(given["chapters"], 2)}
    ),
    "a chapter has a scale of zero": lambda given: (
        given | {"scales": given["scales"] * torch.tensor([0.0, 1.0]).to(given["scales"])}
    ),
}


def by_loops(query, keys, values, chapters, scales) -> torch.Tensor:
    """Equation 4 for every token and head, over the memory tokens of its segment's chapters, in float64."""
    segments, length, heads, width = query.shape
    rows = []
    for segment, t, h in itertools.product(range(segments), range(length), range(heads)):
        scores, read = [], []
        for index, chapter in enumerate(chapters[segment].tolist()):
            scale = scales[segment, index].double()
            for m in range(keys.shape[1]):
                key, value = (table[chapter, m, h].double() for table in (keys, values))
                scores.append(torch.dot(query[segment, t, h].double(), scale * key) / math.sqrt(width))
                read.append(scale * value)
        weights = torch.stack(scores).softmax(0)
        rows.append(sum(weight * value for weight, value in zip(weights, read, strict=True)))
    return torch.stack(rows).view(query.shape)

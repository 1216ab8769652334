"""Cross-attention to chapters by loops over tokens, heads and memory tokens, and small arguments to judge the tensor code with."""

import math

import torch

CHAPTERS, MEMORY_TOKENS, WIDTH = 5, 3, 4


def made(
    batch: int = 2,
    tokens: int = 6,
    stretches: int = 3,
    chosen: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.float64,
    weighed: tuple[str, ...] = ("scales", "biases"),
) -> dict[str, torch.Tensor]:
    """Arguments of the op, each of which wants a gradient where it has one."""
    generator = torch.Generator().manual_seed(batch + 10 * tokens + 100 * stretches)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    table = (CHAPTERS, MEMORY_TOKENS, kv_heads, WIDTH)
    order = torch.rand(batch, stretches, CHAPTERS, generator=generator).argsort(-1)
    arguments = {
        "query": normal(batch, tokens, heads, WIDTH),
        "keys": normal(*table),
        "values": normal(*table),
        "chapters": order[..., :chosen],
    }
    return arguments | {name: normal(batch, stretches, chosen) for name in weighed}


def by_loops(query, keys, values, chapters, scales=None, biases=None) -> torch.Tensor:
    """Equation 4 for every token and head, over the memory tokens of its stretch's chapters, in float64."""
    batch, tokens, heads, width = query.shape
    length, group = tokens // max(chapters.shape[1], 1), heads // keys.shape[2]
    rows = []
    for b in range(batch):
        for t in range(tokens):
            stretch = t // length
            for h in range(heads):
                scores, read = [], []
                for index, chapter in enumerate(chapters[b, stretch].tolist()):
                    scale = 1.0 if scales is None else scales[b, stretch, index].double()
                    bias = 0.0 if biases is None else biases[b, stretch, index].double()
                    for m in range(keys.shape[1]):
                        key, value = (table[chapter, m, h // group].double() for table in (keys, values))
                        scores.append(torch.dot(query[b, t, h].double(), scale * key) / math.sqrt(width) + bias)
                        read.append(scale * value)
                weights = torch.stack(scores).softmax(0)
                rows.append(sum(weight * value for weight, value in zip(weights, read, strict=True)))
    return torch.stack(rows).view(batch, tokens, heads, width)

"""Random inputs whose slots have a chosen popularity.

Queries are built from the slots that they are to retrieve, not the other way round. The sub-keys of a head are an
orthonormal basis. If there are more sub-keys than dimensions, a second basis (Hadamard's) follows, in which every
vector of the first has equal shares. One random rotation turns both. Two of these keys have a product of 1, 0 or +-1 /
sqrt(d / 2).

For k = 4, a query is the sum of two row keys and of two column keys that are drawn for it, the second of each a little
shorter. Each of the four pairs then scores above any other pair, and no two of them score alike, by margins well above
rounding in float32. So a query retrieves exactly the pairs of the drawn rows and columns. These are drawn with one of
two popularities:

- `uniform`: every sub-key has the same probability;
- `zipf`: the r-th most popular sub-key has a probability proportional to 1 / r. The order of popularity differs from
  head to head. The second row is drawn among the other rows with the same proportions, and so is the second column.
"""

import math

import torch

from benchmarks.ops.shapes import Case, Shape

_GAIN, _NOISE = 2.0, 0.002
_SECOND = {"row_keys": 0.98, "column_keys": 0.96}
# Fewest dimensions for two bases: with fewer, their keys would be too similar.
_FEWEST_DIMENSIONS = 32


def sub_key_probabilities(popularity: str, n: int, device: str = "cpu") -> torch.Tensor:
    """Return the probability that each sub-key is drawn, most popular first: `[n]`, float32."""
    ranks = torch.arange(1, n + 1, dtype=torch.float32, device=device)
    weights = {"uniform": torch.ones_like(ranks), "zipf": 1 / ranks}[popularity]
    return weights / weights.sum()


def draw_sub_keys(case: Case, generator: torch.Generator) -> torch.Tensor:
    """Draw sqrt(k) distinct sub-keys of one side for each token and head: `[S, H, sqrt(k)]`, int64."""
    shape, side = case.shape, math.isqrt(case.shape.k)
    assert side * side == shape.k, "the root of k is drawn for rows and for columns"
    by_rank = sub_key_probabilities(case.popularity, shape.n, case.device)
    order = torch.rand(shape.heads, shape.n, generator=generator, device=case.device).argsort(-1)
    drawn = [
        torch.multinomial(by_rank[order[head]].expand(case.tokens, -1), side, generator=generator)
        for head in range(shape.heads)
    ]
    return torch.stack(drawn, dim=1)


def sub_keys(shape: Shape, device: str, generator: torch.Generator) -> torch.Tensor:
    """Return unit keys of one side, `[H, n, d / 2]`, float32, no two with a product above 1 / sqrt(d / 2)."""
    half = shape.head_dim // 2
    frame = torch.eye(half, device=device)
    if shape.n > half:
        assert not half & (half - 1) and _FEWEST_DIMENSIONS <= half and shape.n <= 2 * half, shape
        hadamard = torch.ones(1, 1, device=device)
        while len(hadamard) < half:
            hadamard = torch.cat((torch.cat((hadamard, hadamard), 1), torch.cat((hadamard, -hadamard), 1)))
        frame = torch.cat((frame, hadamard / math.sqrt(half)))
    noise = torch.randn(shape.heads, half, half, generator=generator, device=device)
    rotation = torch.linalg.qr(noise).Q
    return frame[: shape.n] @ rotation


def slots_of(case: Case, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return the slots of all pairs of the drawn rows and columns: `[S, H, k]`."""
    return (rows.unsqueeze(-1) * case.shape.n + columns.unsqueeze(-2)).flatten(-2)


def retrieval_inputs(case: Case, generator: torch.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return `query`, `row_keys` and `column_keys`, float32, and the slots `[S, H, k]` that the query retrieves."""
    drawn, tensors, halves = [], {}, []
    for side in ("row_keys", "column_keys"):
        keys = sub_keys(case.shape, case.device, generator)  # [H, n, d / 2]
        chosen = draw_sub_keys(case, generator)  # [S, H, sqrt(k)]
        heads = torch.arange(case.shape.heads, device=case.device).view(-1, 1)
        parts = keys[heads, chosen]  # [S, H, sqrt(k), d / 2]
        gains = torch.full(parts.shape[2:3], _GAIN, device=case.device)
        gains[1:] *= _SECOND[side]
        half = (gains.unsqueeze(-1) * parts).sum(-2)
        halves.append(half + _NOISE * torch.randn(half.shape, generator=generator, device=case.device))
        tensors[side] = keys
        drawn.append(chosen)
    return {"query": torch.cat(halves, -1), **tensors}, slots_of(case, *drawn)


def value_inputs(case: Case, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return `value_bank` and `value_transform` of a head-wise memory, float32."""
    shape = case.shape
    bank = torch.randn(shape.slots, shape.head_dim, generator=generator, device=case.device)
    transform = torch.randn(
        shape.heads, shape.head_dim, shape.head_dim, generator=generator, device=case.device
    ) / math.sqrt(shape.head_dim)
    return {"value_bank": bank, "value_transform": transform}

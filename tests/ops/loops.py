"""The head-wise memory of MIDUS in plain Python numbers: loops over tokens, heads and all n * n slots.

Written from equations 11 to 17, with gradients derived by hand, to judge the tensor code by. A Python float is a
float64.
"""

import math
from dataclasses import dataclass

import torch

Vector = list[float]
Matrix = list[Vector]


@dataclass
class Gradients:
    """Gradients of `sum(output * output_gradient)`, each shaped as what it belongs to."""

    query: list[Matrix]
    row_keys: list[Matrix]
    column_keys: list[Matrix]
    value_bank: Matrix
    value_transform: list[Matrix]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        fields = (self.query, self.row_keys, self.column_keys, self.value_bank, self.value_transform)
        return tuple(torch.tensor(field, dtype=torch.float64) for field in fields)


def slot_scores(query: Vector, row_keys: Matrix, column_keys: Matrix) -> Vector:
    """The scores of all n * n slots for one token and head (equations 11 and 13); slot `i * n + j` pairs i with j."""
    half = len(query) // 2
    return [
        sum(query[p] * row_key[p] for p in range(half)) + sum(query[half + p] * column_key[p] for p in range(half))
        for row_key in row_keys
        for column_key in column_keys
    ]


def best_slots(scores: Vector, k: int) -> list[int]:
    """The k slots of highest score, best first; of equal ones, the one that comes first."""
    return sorted(range(len(scores)), key=lambda slot: -scores[slot])[:k]


def softmax(scores: Vector) -> Vector:
    highest = max(scores)
    exponentials = [math.exp(score - highest) for score in scores]
    return [exponential / sum(exponentials) for exponential in exponentials]


def headwise_memory_by_loops(
    query: torch.Tensor,
    row_keys: torch.Tensor,
    column_keys: torch.Tensor,
    value_bank: torch.Tensor,
    value_transform: torch.Tensor,
    k: int,
    output_gradient: torch.Tensor,
) -> tuple[torch.Tensor, Gradients]:
    """Output `[T, H, v]` and gradients for a query `[T, H, d]`; other shapes as in `midus_hf.ops.headwise.op`."""
    tokens, heads, n, half, width = query.shape[0], *row_keys.shape, value_bank.shape[1]
    q, rows, columns = query.tolist(), row_keys.tolist(), column_keys.tolist()
    bank, transform, upstream = value_bank.tolist(), value_transform.tolist(), output_gradient.tolist()
    output = torch.zeros(tokens, heads, width, dtype=torch.float64).tolist()
    gradients = Gradients(
        *(torch.zeros_like(x).tolist() for x in (query, row_keys, column_keys, value_bank, value_transform))
    )

    for t in range(tokens):
        for h in range(heads):
            scores = slot_scores(q[t][h], rows[h], columns[h])
            slots = best_slots(scores, k)
            alpha = softmax([scores[slot] for slot in slots])
            base = [
                sum(a * bank[slot][x] for a, slot in zip(alpha, slots, strict=True)) for x in range(width)
            ]  # eq. 16
            for y in range(width):
                output[t][h][y] = sum(transform[h][y][x] * base[x] for x in range(width))  # eq. 16 and 17

            out = upstream[t][h]
            into_base = [sum(transform[h][y][x] * out[y] for y in range(width)) for x in range(width)]
            for y in range(width):
                for x in range(width):
                    gradients.value_transform[h][y][x] += out[y] * base[x]
            into_alpha = [sum(into_base[x] * bank[slot][x] for x in range(width)) for slot in slots]
            mean = sum(a * g for a, g in zip(alpha, into_alpha, strict=True))
            for a, g, slot in zip(alpha, into_alpha, slots, strict=True):
                for x in range(width):
                    gradients.value_bank[slot][x] += a * into_base[x]
                into_score = a * (g - mean)
                i, j = divmod(slot, n)
                for p in range(half):
                    gradients.query[t][h][p] += into_score * rows[h][i][p]
                    gradients.query[t][h][half + p] += into_score * columns[h][j][p]
                    gradients.row_keys[h][i][p] += into_score * q[t][h][p]
                    gradients.column_keys[h][j][p] += into_score * q[t][h][half + p]
    return torch.tensor(output, dtype=torch.float64), gradients

"""Every memory in plain Python numbers: loops over tokens, heads and all slots, to judge the tensor code by.

Written from MIDUS, equations 4, 5 and 11 to 17, and the definition of batch normalisation. A Python float is a float64.
"""

import math
from typing import Any

import torch

Vector = list[float]
Matrix = list[Vector]

EPS, MOMENTUM = 1e-5, 0.1


def dot(left: Vector, right: Vector) -> float:
    return sum(x * y for x, y in zip(left, right, strict=True))


def mean_and_variance(values: Vector) -> tuple[float, float]:
    mean = sum(values) / len(values)
    return mean, sum((value - mean) ** 2 for value in values) / len(values)


def softmax(scores: Vector) -> Vector:
    exponentials = [math.exp(score - max(scores)) for score in scores]
    return [exponential / sum(exponentials) for exponential in exponentials]


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def head_queries(state: dict[str, Any], inputs: Matrix, heads: int) -> list[Matrix]:
    """`[T, H, w]`: the inputs, projected where there is a projection, in equal shares."""
    projection = state.get("query_projection.weight")
    queries = [[dot(row, x) for row in projection] for x in inputs] if projection else inputs
    width = len(queries[0]) // heads
    return [[query[head * width : (head + 1) * width] for head in range(heads)] for query in queries]


def normalised(state: dict[str, Any], queries: list[Matrix], query_norm: str, training: bool) -> list[Matrix]:
    """Queries after their norm; a batch norm that trains updates the running statistics in `state`."""
    if query_norm == "none":
        return queries
    gain, bias = state["query_norm_weight"], state["query_norm_bias"]
    result = [[list(share) for share in token] for token in queries]
    for h in range(len(queries[0])):
        for f in range(len(queries[0][0])):
            column = [token[h][f] for token in queries]
            if query_norm == "batch" and training:
                mean, variance = mean_and_variance(column)
                unbiased = variance * len(column) / max(len(column) - 1, 1)
                for name, value in (("query_mean", mean), ("query_variance", unbiased)):
                    state[name][h][f] = (1 - MOMENTUM) * state[name][h][f] + MOMENTUM * value
            elif query_norm == "batch":
                mean, variance = state["query_mean"][h][f], state["query_variance"][h][f]
            for t, token in enumerate(queries):
                if query_norm == "layer":
                    mean, variance = mean_and_variance(token[h])
                result[t][h][f] = (token[h][f] - mean) / math.sqrt(variance + EPS) * gain[h][f] + bias[h][f]
    return result


def slot_scores(state: dict[str, Any], head: int, query: Vector) -> Vector:
    """Scores of all slots (equation 4), or of all pairs of sub-keys (11 and 13); slot `i * n + j` pairs i with j."""
    if "slot_keys" in state:
        return [dot(key, query) for key in state["slot_keys"][head]]
    half = len(query) // 2
    rows = [dot(key, query[:half]) for key in state["row_keys"][head]]
    columns = [dot(key, query[half:]) for key in state["column_keys"][head]]
    return [row + column for row in rows for column in columns]


def memory_by_loops(
    memory: torch.nn.Module, attention_output: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What a memory returns for `[B, T, W]`, and its state dict afterwards, from its parameters and options."""
    state = {name: tensor.double().tolist() for name, tensor in memory.state_dict().items()}
    inputs = attention_output.double().flatten(0, 1).tolist()
    heads = memory.num_heads
    queries = normalised(state, head_queries(state, inputs, heads), memory.query_norm, memory.training)
    outputs = []
    for x, shares in zip(inputs, queries, strict=True):
        of_heads = []
        for h, query in enumerate(shares):
            scores = slot_scores(state, h, query)
            slots = sorted(range(len(scores)), key=lambda slot, scores=scores: -scores[slot])[: memory.k]
            weights = softmax([scores[slot] / memory.temperature for slot in slots])
            bank = state["value_bank"][h] if getattr(memory, "values", "") == "own" else state["value_bank"]
            total = [dot(weights, [bank[slot][y] for slot in slots]) for y in range(len(bank[0]))]
            if "value_transform" in state:
                total = [dot(row, total) for row in state["value_transform"][h]]
            if memory.gate == "head":
                opened = sigmoid(dot(state["gate_weight"][h], x) + state["gate_bias"][h])
                total = [opened * value for value in total]
            of_heads.append(total)
        if "query_projection.weight" in state:  # values have the full width, and heads are summed (equation 15)
            output = [sum(parts) for parts in zip(*of_heads, strict=True)]
        else:  # heads write shares of the width (equation 17)
            output = [value for of_head in of_heads for value in of_head]
        if memory.gate == "token":
            opened = sigmoid(dot(state["gate_weight"][0], x) + state["gate_bias"][0])
            output = [opened * value for value in output]
        outputs.append(output)
    after = {name: torch.tensor(value, dtype=torch.float64) for name, value in state.items()}
    return torch.tensor(outputs, dtype=torch.float64).unflatten(0, attention_output.shape[:2]), after

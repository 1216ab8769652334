"""Every memory that retrieves slots by loops over tokens, heads and all slots, in float64, to judge the tensor code by.

Written from MIDUS, equations 4, 5 and 11 to 17, and the definition of batch normalisation.
"""

import torch

EPS, MOMENTUM = 1e-5, 0.1
State = dict[str, torch.Tensor]


def normalised(state: State, queries: torch.Tensor, query_norm: str, training: bool) -> torch.Tensor:
    """Return queries `[S, H, w]` after their norm; a batch norm that trains updates the running statistics in `state`."""
    if query_norm == "none":
        return queries
    if query_norm == "layer":
        mean, variance = queries.mean(-1, keepdim=True), queries.var(-1, correction=0, keepdim=True)
    elif training:
        mean, variance = queries.mean(0), queries.var(0, correction=0)
        unbiased = variance * len(queries) / max(len(queries) - 1, 1)
        for name, value in (("query_mean", mean), ("query_variance", unbiased)):
            state[name] = (1 - MOMENTUM) * state[name] + MOMENTUM * value
    else:
        mean, variance = state["query_mean"], state["query_variance"]
    return (queries - mean) / (variance + EPS).sqrt() * state["query_norm_weight"] + state["query_norm_bias"]


def slot_scores(state: State, head: int, query: torch.Tensor) -> list[torch.Tensor]:
    """Scores of all slots (equation 4), or of all pairs of sub-keys (11 and 13); slot `i * n + j` pairs i with j."""
    if "slot_keys" in state:
        return [torch.dot(key, query) for key in state["slot_keys"][head]]
    rows, columns = (
        [torch.dot(key, half) for key in state[name][head]]
        for name, half in zip(("row_keys", "column_keys"), query.chunk(2), strict=True)
    )
    return [row + column for row in rows for column in columns]


@torch.no_grad()
def memory_by_loops(memory: torch.nn.Module, attention_output: torch.Tensor) -> tuple[torch.Tensor, State]:
    """What a memory returns for `[B, T, W]`, and its state dict afterwards, from its parameters and options."""
    state = {name: tensor.double().clone() for name, tensor in memory.state_dict().items()}
    inputs = attention_output.double().flatten(0, 1)
    projects = "query_projection.weight" in state
    queries = inputs @ state["query_projection.weight"].T if projects else inputs
    queries = normalised(state, queries.unflatten(-1, (memory.num_heads, -1)), memory.query_norm, memory.training)

    outputs = []
    for of_heads in queries:
        written = []
        for head, query in enumerate(of_heads):
            scores = slot_scores(state, head, query)
            slots = sorted(range(len(scores)), key=lambda slot, scores=scores: -scores[slot].item())[: memory.k]
            weights = torch.stack([scores[slot] for slot in slots]).softmax(0)
            total = sum(weight * state["value_bank"][slot] for weight, slot in zip(weights, slots, strict=True))
            total = state["value_transform"][head] @ total if "value_transform" in state else total
            written.append(total)
        # With a projection values have the full width, and heads are summed (equation 15); else heads write shares of it (17).
        outputs.append(torch.stack(written).sum(0) if projects else torch.cat(written))
    return torch.stack(outputs).unflatten(0, attention_output.shape[:2]), state

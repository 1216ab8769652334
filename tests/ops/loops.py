"""The head-wise memory of MIDUS by loops over tokens, heads and all n * n slots, to judge the tensor code by.

Written from equations 11 to 17. Numbers are float64 tensors, so that autograd gives gradients of the loops as well.
"""

import torch


def slot_scores(query: torch.Tensor, row_keys: torch.Tensor, column_keys: torch.Tensor) -> list[torch.Tensor]:
    """The scores of all n * n slots for one token and head (equations 11 and 13); slot `i * n + j` pairs i with j."""
    rows, columns = query.split(len(query) // 2)
    return [
        torch.dot(rows, row_key) + torch.dot(columns, column_key) for row_key in row_keys for column_key in column_keys
    ]


def best_slots(scores: list[torch.Tensor], k: int) -> list[int]:
    """The k slots of highest score, best first; of equal ones, the one that comes first."""
    return sorted(range(len(scores)), key=lambda slot: -scores[slot].item())[:k]


def headwise_memory_by_loops(query, row_keys, column_keys, value_bank, value_transform, k: int) -> torch.Tensor:
    """Return the output `[T, H, v]` for a query `[T, H, d]`; other shapes as in `midus_hf.ops.midus_hml.op`."""
    outputs = []
    for token in query:
        for head, queries in enumerate(token):
            scores = slot_scores(queries, row_keys[head], column_keys[head])
            slots = best_slots(scores, k)
            weights = torch.stack([scores[slot] for slot in slots]).softmax(0)
            retrieved = sum(weight * value_bank[slot] for weight, slot in zip(weights, slots, strict=True))  # eq. 16
            outputs.append(value_transform[head] @ retrieved)  # eq. 16 and 17
    return torch.stack(outputs).view(*query.shape[:2], -1)

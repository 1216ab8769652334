"""Arguments whose shapes disagree are refused by the ops themselves."""

import pytest
import torch

from midus_hf.ops import flat_key_topk, headwise_memory, product_key_topk
from midus_hf.ops.ultramem_v2.op import tucker_topk

SIDES = {"query": (3, 2, 8), "row_keys": (2, 5, 4), "column_keys": (2, 5, 4)}
SCORES = {
    "row_scores": (3, 2, 5, 2),
    "column_scores": (3, 2, 5, 2),
    "core": (2, 2, 2),
    "row_vector": (2, 2),
    "column_vector": (2, 2),
}
# Ops, and shapes and numbers that they take.
TAKEN = {
    product_key_topk: {**SIDES, "k": 2},
    flat_key_topk: {"query": (1, 2, 4), "keys": (2, 5, 4), "k": 1},
    headwise_memory: {**SIDES, "value_bank": (25, 5), "value_transform": (2, 5, 5), "k": 2},
    tucker_topk: {**SCORES, "k": 4, "side": 3},
}
WRONG = [
    (product_key_topk, {"query": (3, 2, 6)}, r"query ends in \(2, 6\); expected \(heads, 2 \* sub-key width\) = \(2, 8\)"),
    (product_key_topk, {"query": (3, 4, 8)}, r"query ends in \(4, 8\)"),
    (product_key_topk, {"query": (8,)}, r"query ends in \(8,\)"),
    (product_key_topk, {"row_keys": (1, 2, 5, 4)}, r"row_keys is \(1, 2, 5, 4\); expected \[heads, n, sub-key width\]"),
    (product_key_topk, {"row_keys": (2, 5)}, r"row_keys is \(2, 5\); expected \[heads, n, sub-key width\]"),
    (product_key_topk, {"column_keys": (2, 6, 4)}, r"column_keys is \(2, 6, 4\); expected the shape of row_keys, \(2, 5, 4\)"),
    (product_key_topk, {"k": 0}, r"k is 0; expected 1 <= k <= n = 5\. Lower k or raise n"),
    (product_key_topk, {"k": 6}, r"k is 6; expected 1 <= k <= n = 5\. Lower k or raise n"),
    (flat_key_topk, {"keys": (3, 4)}, r"keys is \(3, 4\); expected \[heads, slots, key width\]"),
    (flat_key_topk, {"keys": (2, 5, 3)}, r"query ends in \(2, 4\); expected \(heads, key width\) = \(2, 3\)"),
    (flat_key_topk, {"k": 6}, r"k is 6; expected 1 <= k <= N = 5\. Lower k or raise N"),
    (headwise_memory, {"value_bank": (24, 5)}, r"value_bank is \(24, 5\); expected \[n \* n, v\] or \[H, n \* n, v\] with n .* 25"),
    (headwise_memory, {"value_bank": (25,)}, r"value_bank is \(25,\); expected \[n \* n, v\] or"),
    (headwise_memory, {"value_bank": (2, 25, 5)}, "value_transform is given with a bank per head; expected None, or a bank"),
    (headwise_memory, {"value_transform": (2, 5, 4)}, r"value_transform is \(2, 5, 4\); expected \(H, v, v\) = \(2, 5, 5\)"),
    (headwise_memory, {"value_transform": (1, 5, 5)}, r"value_transform is \(1, 5, 5\); expected \(H, v, v\) = \(2, 5, 5\)"),
    (headwise_memory, {"column_keys": (2, 6, 4)}, r"column_keys is \(2, 6, 4\); expected the shape of row_keys"),
    (tucker_topk, {"row_scores": (2, 5, 2), "column_scores": (2, 5, 2)}, r"row_scores is \(2, 5, 2\) and column_scores"),
    (tucker_topk, {"column_scores": (3, 2, 4, 2)}, r"column_scores \(3, 2, 4, 2\); expected equal shapes"),
    (tucker_topk, {"core": (2, 2, 3)}, r"core is \(2, 2, 3\); expected \(2, 2, 2\)"),
    (tucker_topk, {"row_vector": (2, 3)}, r"row_vector is \(2, 3\); expected \(2, 2\)"),
    (tucker_topk, {"column_vector": (2,)}, r"column_vector is \(2,\); expected"),
    *((tucker_topk, {"side": side}, f"side is {side}; expected 1 <= side <= n = 5") for side in (0, 6)),
    *((tucker_topk, {"k": k}, f"k is {k}; expected 1 <= k <= 9, the pairs that the first stage keeps") for k in (0, 10)),
]  # fmt: skip


@pytest.mark.parametrize(("op", "changes", "message"), WRONG)
def test_wrong_arguments_are_refused(op, changes, message):
    given = {
        name: torch.zeros(each) if isinstance(each, tuple) else each for name, each in (TAKEN[op] | changes).items()
    }
    with pytest.raises(ValueError, match=message):
        op(**given)

"""Ops refuse arguments whose shapes disagree, or that the chosen body cannot take."""

import pytest
import torch
from ops.table import stacked

from midus_hf.ops import flat_key_topk, headwise_memory, op_choices, product_key_topk, weighted_gather
from midus_hf.ops.block_linear import block_linear
from midus_hf.ops.gather.op import gathered_products
from midus_hf.ops.moc.op import chapter_attention
from midus_hf.ops.moc.triton import segment_refusal
from midus_hf.ops.moda import triton as depth_kernels
from midus_hf.ops.moda.op import depth_attention
from midus_hf.ops.ultramem_v2 import tucker_topk

SIDES = {"query": (3, 2, 8), "row_keys": (2, 5, 4), "column_keys": (2, 5, 4)}
SCORES = dict.fromkeys(("row_scores", "column_scores"), (3, 2, 5, 2)) | {"core": (2, 2, 2)}
CHAPTERS = {"query": (6, 2, 4, 4)} | dict.fromkeys(("keys", "values"), (5, 3, 4, 4))
# Ops, and shapes and numbers that they take.
TAKEN = {
    product_key_topk: {**SIDES, "k": 2},
    flat_key_topk: {"query": (1, 2, 4), "keys": (2, 5, 4), "k": 1},
    headwise_memory: {**SIDES, "value_bank": (25, 5), "value_transform": (2, 5, 5), "k": 2},
    tucker_topk: {**SCORES, "row_vector": (2, 2), "column_vector": (2, 2), "k": 4, "side": 3},
    chapter_attention: {**CHAPTERS, "chapters": (6, 2), "scales": (6, 2)},
    depth_attention: {"query": (1, 4, 3, 4), "keys": [(1, 2, 3, 4)], "values": [(1, 2, 3, 4)], "scaling": 1.0},
    weighted_gather: {"bank": (7, 5), "slots": (2, 3, 6), "weights": (2, 3, 6)},
    block_linear: {"inputs": (5, 3, 4), "weights": (3, 6, 4), "blocks": (5,)},
    gathered_products: {"vectors": (2, 3, 5), "bank": (7, 5), "slots": (2, 3, 6)},
}
WRONG = [
    (product_key_topk, {"query": (3, 2, 6)}, r"query ends in \(2, 6\); expected \(heads, 2 \* sub-key width\) = \(2, 8\)"),
    (product_key_topk, {"row_keys": (1, 2, 5, 4)}, r"row_keys is \(1, 2, 5, 4\); expected \[heads, n, sub-key width\]"),
    (product_key_topk, {"column_keys": (2, 6, 4)}, r"column_keys is \(2, 6, 4\); expected the shape of row_keys, \(2, 5, 4\)"),
    *((product_key_topk, {"k": k}, rf"k is {k}; expected 1 <= k <= n = 5\. Lower k or raise n") for k in (0, 6)),
    (flat_key_topk, {"keys": (3, 4)}, r"keys is \(3, 4\); expected \[heads, slots, key width\]"),
    (flat_key_topk, {"keys": (2, 5, 3)}, r"query ends in \(2, 4\); expected \(heads, key width\) = \(2, 3\)"),
    (flat_key_topk, {"k": 6}, r"k is 6; expected 1 <= k <= N = 5\. Lower k or raise N"),
    (headwise_memory, {"value_bank": (24, 5)}, r"value_bank is \(24, 5\); expected \[n \* n, v\] or .* n \* n = 25"),
    (headwise_memory, {"value_bank": (2, 25, 5)}, "value_transform is given with a bank per head; expected None, or"),
    (headwise_memory, {"value_transform": (2, 5, 4)}, r"value_transform is \(2, 5, 4\); expected \(H, v, v\) = \(2, 5, 5\)"),
    (tucker_topk, dict.fromkeys(SCORES, (2, 5, 2)), r"row_scores is \(2, 5, 2\) and column_scores"),
    (tucker_topk, {"column_scores": (3, 2, 4, 2)}, r"column_scores \(3, 2, 4, 2\); expected equal shapes"),
    (tucker_topk, {"core": (2, 2, 3)}, r"core is \(2, 2, 3\); expected \(2, 2, 2\)"),
    (tucker_topk, {"row_vector": (2, 3)}, r"row_vector is \(2, 3\); expected \(2, 2\)"),
    *((tucker_topk, {"side": side}, f"side is {side}; expected 1 <= side <= n = 5") for side in (0, 6)),
    *((tucker_topk, {"k": k}, f"k is {k}; expected 1 <= k <= 9, the pairs") for k in (0, 10)),
    (chapter_attention, {"values": (5, 3, 4, 3)}, r"values is \(5, 3, 4, 3\); expected \[C, M, heads, width\] twice"),
    (chapter_attention, {"query": (6, 2, 4, 3)}, r"query is \(6, 2, 4, 3\); expected .* the keys' 4 heads and width 4"),
    (chapter_attention, {"chapters": (4, 2)}, r"chapters is \(4, 2\); expected \[6, 1 or more chapters each\], a row per segment"),
    (chapter_attention, {"chapters": (6, 0), "scales": (6, 0)}, r"chapters is \(6, 0\); expected"),
    *((chapter_attention, {"scales": shape}, r"scales is .*; expected .* chapters, \(6, 2\)") for shape in ((6, 1), (2, 6))),
    (depth_attention, {"keys": [], "values": []}, "there are 0 keys and 0 values; expected as many, and one or more"),
    (depth_attention, {"keys": [(1, 3, 3, 4)], "values": [(1, 3, 3, 4)]}, r"query is \(1, 4, 3, 4\) and a slot \(1, 3, 3, 4\)"),
    (depth_attention, {"values": [(1, 4, 3, 4)]}, r"a slot \(1, 4, 3, 4\); expected .* as many heads or a divisor of them"),
    (weighted_gather, {"bank": (3,)}, r"bank is \(3,\); expected \[rows, width\]"),
    (weighted_gather, {"weights": (2, 3, 1)}, r"slots is \(2, 3, 6\) and weights \(2, 3, 1\); expected equal shapes"),
    (block_linear, {"inputs": (2, 4)}, r"inputs is \(2, 4\) and weights \(3, 6, 4\); expected \[batch, tokens, width\]"),
    (block_linear, {"weights": (3, 6, 5)}, r"weights \(3, 6, 5\); expected"),
    (block_linear, {"blocks": (4,)}, r"blocks is \(4,\); expected one for each of the 5 rows"),
    (gathered_products, {"vectors": (2, 3, 3)}, r"vectors is \(2, 3, 3\) and bank \(7, 5\); expected \[\.\.\., width\] and"),
    (gathered_products, {"slots": (3, 1)}, r"slots is \(3, 1\); expected slots for each of the vectors \(2, 3\)"),
]  # fmt: skip


def zeros(shapes):
    if isinstance(shapes, tuple):
        return torch.zeros(shapes)
    return [torch.zeros(shape) for shape in shapes] if isinstance(shapes, list) else shapes


@pytest.mark.parametrize(("op", "changes", "message"), WRONG)
def test_wrong_shapes_and_numbers_are_refused(op, changes, message):
    given = {name: zeros(each) for name, each in (TAKEN[op] | changes).items()}
    with pytest.raises(ValueError, match=message):
        op(**given)


def wide_heads(length: int) -> dict[str, torch.Tensor]:
    """Return two segments of queries of so many tokens, with heads that no kernel takes."""
    query, table = torch.randn(2, length, 1, 257), torch.randn(3, 2, 1, 257)
    chapters = torch.tensor([[0, 1], [1, 2]])
    return {"query": query, "keys": table, "values": table, "chapters": chapters, "scales": torch.ones(2, 2)}


@pytest.fixture
def kernels(monkeypatch):
    """Kernels seem to run on a CPU."""
    monkeypatch.setattr("midus_hf.ops.dispatch.calling.HAS_TRITON", True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.mark.usefixtures("kernels")
def test_wide_heads_are_refused_only_for_kernels():
    arguments, message = wide_heads(1), "'triton', but heads are 257 wide; expected 256 or less, or choose 'torch'"
    with pytest.raises(ValueError, match=message):
        chapter_attention(**arguments, backend="triton")
    with op_choices(backend="triton"), pytest.raises(ValueError, match=message):
        chapter_attention(**arguments)
    torch.testing.assert_close(chapter_attention(**arguments), chapter_attention(**arguments, backend="reference"))
    long = wide_heads(16)  # which matrix products read on every backend
    assert torch.equal(chapter_attention(**long, backend="triton"), chapter_attention(**long, backend="torch"))


def test_too_many_pairs_are_refused():
    assert segment_refusal(32, 64, 1 << 25) is None
    assert "there are 33554433 pairs" in segment_refusal(32, 64, (1 << 25) + 1)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("sizes", "limit", "message"),
    [
        ({"width": 257}, None, "heads are 257 wide; expected 256 or less"),
        ({"group": 65, "width": 1}, None, "65 query heads read each head of keys and values; expected 64 or fewer"),
        ({}, 11, "there are 2 texts of 3 tokens and 2 heads of keys; expected 11 or less in all"),
    ],
    ids=["wide", "many", "programs"],
)
def test_depth_that_kernels_cannot_take_is_refused(sizes, limit, message, monkeypatch):
    monkeypatch.setattr(depth_kernels, "_MAX_PROGRAMS", limit or 1 << 30)
    query, *slots = (tensor.cpu() for tensor in stacked(tokens=3, slots=2, **sizes).values())
    with pytest.raises(ValueError, match=f"backend is 'triton', but {message}, or choose 'torch'"):
        depth_attention(query, slots[:2], slots[2:], 1.0, backend="triton")

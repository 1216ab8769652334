"""What half precision gives up where scores carry their columns: how many rows, and how much of a score."""

import itertools
import math
import re

import pytest
import torch
from ops.kernels.closeness import assert_close
from ops.kernels.conftest import DEVICE

from midus_hf.ops import OpChoices, headwise_memory, op_choices
from midus_hf.ops.headwise.lookup import lookup
from midus_hf.ops.headwise.triton.packed import triton_output
from midus_hf.ops.product_key.triton.packed import MOST_RETRIEVED, MOST_SUB_KEYS, packed_tile, packs


def inputs(tokens, heads, half, n, width, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, heads, 2 * half), (heads, n, half), (heads, n, half), (n * n, width))
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    return [(x / half**0.5 if 0 < i < 3 else x).to(DEVICE, dtype) for i, x in enumerate(tensors)]


def looked_up(arguments, k, exact=False, temperature=1.0):
    return lookup(*arguments, None, k, temperature, exact, "triton")


def all_scores(query, row_keys, column_keys, *_):
    """Of every slot, `[S, H, n * n]`, in float64."""
    halves = query.double().chunk(2, dim=-1)
    rows, columns = (
        torch.einsum("shp,hnp->shn", half, keys.double())
        for half, keys in zip(halves, (row_keys, column_keys), strict=True)
    )
    return (rows.unsqueeze(-1) + columns.unsqueeze(-2)).flatten(-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "tokens, heads, half, n, width, k",
    [
        (1, 1, 1, 1, 1, 1),
        (64, 2, 32, 64, 64, 4),  # without a mask
        (33, 3, 8, 64, 16, 4),
        (17, 9, 32, 12, 20, 3),
        (5, 1, 128, 16, 256, 8),
        (70, 2, 4, 5, 3, 5),
        (40, 3, 40, 100, 8, 7),
        (65, 1, 8, 128, 4, 2),
        (9, 2, 48, 33, 6, 6),
    ],
)
def test_slots_are_the_best_but_where_scores_are_as_close_as_a_tag(tokens, heads, half, n, width, k, dtype):
    arguments = inputs(tokens, heads, half, n, width, dtype)
    output, slots, weights = looked_up(arguments, k)
    scores = all_scores(*arguments)
    best = scores.topk(k, dim=-1)
    found = scores.gather(-1, slots.long())  # [S, H, k]
    assert all(len(set(row)) == k for row in slots.flatten(0, 1).tolist())
    # A score loses up to 2^-23 times the tag of its column; a sum of two up to twice that, and the tag of its ranks.
    largest = best.values.abs().amax(-1, keepdim=True) + scores.abs().amax(-1, keepdim=True)
    given_up = (best.values - found).abs() / largest
    assert given_up.max() <= 2.0**-15
    differ = (slots != best.indices).any(-1)
    assert differ.sum() <= max(1, slots[..., 0].numel() // 64)
    torch.testing.assert_close(weights.double(), found.softmax(-1), rtol=0, atol=2.0**-15)
    assert (weights.diff(dim=-1) <= 1e-6).all()
    values = arguments[3].double()[slots.long()]  # [S, H, k, v]
    assert_close("output", output, (weights.double().unsqueeze(-1) * values).sum(-2), dtype)


def test_few_rows_differ_from_exact_ones_and_by_little():
    arguments = inputs(256, 2, 16, 64, 4)
    (_, packed, _), (_, exact, _) = looked_up(arguments, 4), looked_up(arguments, 4, exact=True)
    scores = all_scores(*arguments)
    assert torch.equal(exact.long(), scores.topk(4, dim=-1).indices)
    differ = (packed != exact).any(-1)
    assert differ.float().mean() <= 0.005
    assert (scores.gather(-1, exact.long()) - scores.gather(-1, packed.long())).abs().max() <= 3e-5


def test_of_equal_scores_each_slot_is_taken_once():
    query, row_keys, _, bank = inputs(7, 2, 4, 16, 8)
    for keys in (row_keys * 0, row_keys[:, :1].expand(-1, 16, -1)):
        _, slots, weights = looked_up((query, keys, keys, bank), 4)
        assert all(len(set(row)) == 4 for row in slots.flatten(0, 1).tolist())
        torch.testing.assert_close(weights, torch.full_like(weights, 0.25), rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("n, k", [(12, 8), (64, 4)])
@pytest.mark.parametrize("spoiled", ["query", "row_keys", "column_keys"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_spoils_its_rows_and_nothing_is_read_outside(spoiled, value, n, k):
    arguments = dict(zip(("query", "row_keys", "column_keys", "bank"), inputs(6, 2, 4, n, 4), strict=True))
    good, _, _ = looked_up(tuple(arguments.values()), k)
    arguments[spoiled] = arguments[spoiled].clone()
    arguments[spoiled][(1, 0) if spoiled == "query" else (1, 5)] = value
    output, slots, _ = looked_up(tuple(arguments.values()), k)
    is_spoiled = torch.zeros(6, 2, dtype=torch.bool)
    is_spoiled[(1, 0) if spoiled == "query" else (slice(None), 1)] = True  # keys spoil all tokens of their head
    assert slots.min() >= 0 and slots.max() < n * n
    assert output[is_spoiled].isnan().all() and torch.equal(output[~is_spoiled], good[~is_spoiled])


def test_the_temperature_divides_scores():
    arguments = inputs(20, 2, 8, 8, 4)
    (_, slots, weights), scores = looked_up(arguments, 3, temperature=0.3), all_scores(*arguments)
    expected = (scores.gather(-1, slots.long()) / 0.3).softmax(-1)
    torch.testing.assert_close(weights.double(), expected, rtol=0, atol=1e-5)


def test_half_precision_of_few_sub_keys_and_ranks_is_packed_unless_exact_is_asked_for(monkeypatch):
    taken = []
    for name in ("packed_forward", "triton_forward"):
        whole = triton_output.__globals__[name]
        monkeypatch.setitem(
            triton_output.__globals__,
            name,
            lambda *given, name=name, whole=whole: (taken.append(name), whole(*given))[1],
        )

    def body(n, k, dtype, **choices):
        with op_choices(backend="triton", **choices):
            headwise_memory(*inputs(2, 1, 2, n, 2, dtype), None, k)
        return taken.pop()

    assert body(4, 2, torch.bfloat16) == body(4, 2, torch.float16) == "packed_forward"
    assert body(4, 2, torch.float32) == "triton_forward"
    assert body(4, 2, torch.bfloat16, exact=True) == "triton_forward"
    assert packs(torch.bfloat16, MOST_SUB_KEYS, MOST_RETRIEVED)
    assert not packs(torch.bfloat16, MOST_SUB_KEYS + 1, 1) and not packs(torch.bfloat16, 64, MOST_RETRIEVED + 1)


@pytest.mark.parametrize("exact", [False, True])
def test_a_compiled_call_selects_as_it_is_told(exact):
    arguments = inputs(40, 2, 8, 32, 4)
    seen = []

    def look(graph, _):
        seen.extend(node.args[-2] for node in graph.graph.nodes if "headwise_lookup" in str(node.target))
        return graph

    torch._dynamo.reset()
    with op_choices(backend="triton", exact=exact):
        compiled = torch.compile(lambda *given: headwise_memory(*given, None, 3), fullgraph=True, backend=look)
        found = compiled(*arguments)
    torch._dynamo.reset()
    assert seen == [exact]
    assert torch.equal(found, looked_up(arguments, 3, exact)[0])


def test_scores_lose_as_many_bits_as_is_documented():
    formula = "max(4, ceil(log2(n)), ceil(log2(k)) + 2)"
    assert formula in OpChoices.__doc__
    for n, k in itertools.product(range(1, MOST_SUB_KEYS + 1), range(1, MOST_RETRIEVED + 1)):
        tile = packed_tile({}, n, k, 32, False)
        assert tile["BITS"] == eval(formula, {"ceil": math.ceil, "log2": math.log2, "n": n, "k": k})
        assert 2 * tile["RANK_BITS"] == 2 * math.ceil(math.log2(k))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exat", "op_choices has no option 'exat'. Did you mean 'exact'?"),
        ("zzz", "op_choices has no option 'zzz'. Expected one of: backend, exact."),
    ],
)
def test_an_unknown_choice_is_refused(name, message):
    with pytest.raises(ValueError, match=re.escape(message)), op_choices(**{name: True}):
        pass


def test_exactness_is_true_or_false():
    with pytest.raises(ValueError, match="exact is 'yes'; expected True or False"), op_choices(exact="yes"):
        pass

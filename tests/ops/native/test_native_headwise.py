"""Head-wise memory in C: exact selection, the same bits by any threads, and nothing read outside of what was given."""

import math

import pytest
import torch

from midus_hf.ops import headwise_memory, op_choices
from midus_hf.ops.headwise_lookup import headwise_lookup_op, lookup
from midus_hf.ops.native_headwise import native_lookup
from midus_hf.ops.native_library import why_missing


@pytest.fixture(scope="module", autouse=True)
def library():
    if why_missing():
        pytest.skip(why_missing())


@pytest.fixture
def threads():
    """Sets how many there are, for the length of a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def inputs(tokens=40, heads=3, half=8, n=12, width=20, own=False, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (tokens, heads, 2 * half),
        (heads, n, half),
        (heads, n, half),
        ((heads,) if own else ()) + (n * n, width),
    ]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def output_and_gradients(arguments, k, **options):
    leaves = [argument.detach().requires_grad_() for argument in arguments]
    output = headwise_memory(*leaves, None, k, backend="native", **options)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).to(output.dtype)
    return output.detach(), *torch.autograd.grad(output, leaves, upstream)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "sizes, k",
    [
        ({}, 4),
        ({"n": 7}, 7),
        ({"n": 1, "half": 1, "width": 1}, 1),
        ({"n": 200, "heads": 1}, 3),
        ({"n": 64, "tokens": 300}, 4),
        ({"n": 40, "tokens": 17, "half": 33, "width": 67}, 33),
    ],
    ids=str,
)
def test_slots_are_those_of_a_search_through_all_of_them(sizes, k, dtype):
    query, row_keys, column_keys, bank = inputs(**sizes, dtype=dtype)
    query, row_keys, column_keys = ((4 * t).round() for t in (query, row_keys, column_keys))  # sums of these are exact
    _, slots, weights = native_lookup(query, row_keys, column_keys, bank, None, k, 1.0)
    halves = query.float().transpose(0, 1).chunk(2, dim=-1)
    rows, columns = (asked @ keys.float().mT for asked, keys in zip(halves, (row_keys, column_keys), strict=True))
    scores = (rows.unsqueeze(-1) + columns.unsqueeze(-2)).flatten(-2).transpose(0, 1)  # [S, H, n * n]
    found = scores.gather(-1, slots.long())
    assert torch.equal(found, scores.topk(k).values)
    assert all(len(set(of_head)) == k for of_token in slots.tolist() for of_head in of_token)
    assert torch.equal(weights.sum(-1).round(decimals=5), torch.ones(weights.shape[:2]))


def test_the_first_of_equal_slots_is_retrieved():
    query, row_keys, column_keys, bank = inputs(tokens=3, heads=1, n=9)
    _, slots, weights = native_lookup(query, row_keys * 0, column_keys * 0, bank, None, 4, 1.0)
    assert torch.equal(weights, torch.full((3, 1, 4), 0.25))
    assert set(slots.flatten().tolist()) <= {row * 9 + column for row in range(4) for column in range(4)}
    assert all(len(set(of_token.flatten().tolist())) == 4 and 0 in of_token for of_token in slots)


@pytest.mark.parametrize("own", [False, True], ids=["shared-bank", "bank-per-head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_change_no_bit(own, dtype, threads):
    arguments = inputs(tokens=1500, own=own, dtype=dtype)
    results = []
    for number in (1, 2, 3):
        threads(number)
        results.append(output_and_gradients(arguments, 4))
    for others in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(results[0], others, strict=True))


def test_other_tokens_of_a_call_change_no_bit():
    arguments = inputs(tokens=77, own=True)
    whole = headwise_memory(*arguments, None, 4, backend="native")
    with torch.no_grad():
        one_by_one = [
            headwise_memory(token[None], *arguments[1:], None, 4, backend="native") for token in arguments[0]
        ]
    assert torch.equal(whole, torch.cat(one_by_one))


@pytest.mark.parametrize("tokens", [2, 300])
@pytest.mark.parametrize("place", ["query", "row key", "column key"])
def test_nan_in_a_score_is_nan_in_what_is_retrieved(place, tokens):
    arguments = inputs(tokens=tokens)
    spoiled = {"query": 0, "row key": 1, "column key": 2}[place]
    arguments[spoiled][0, 0, 0] = math.nan
    output, *gradients = output_and_gradients(arguments, 4)
    expected = torch.zeros(tokens, 3, dtype=torch.bool)
    expected[(slice(0, 1) if place == "query" else slice(None)), 0] = True
    assert torch.equal(output.isnan().all(-1), expected) and torch.equal(output.isnan().any(-1), expected)
    assert [gradient.shape for gradient in gradients] == [argument.shape for argument in arguments]


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinite_scores_read_nothing_outside(value):
    arguments = inputs(own=True)
    arguments[1][:, ::2] = value
    arguments[2][:, 1:] = -value
    _, slots, _ = native_lookup(*arguments, None, 4, 1.0)
    assert slots.min() >= 0 and slots.max() < 144
    assert all(t.shape == a.shape for t, a in zip(output_and_gradients(arguments, 4)[1:], arguments, strict=True))


@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("gradients", [True, False])
def test_a_residual_of_any_dtype_is_added_to_what_was_rounded(stream, gradients):
    arguments = inputs(dtype=torch.bfloat16)
    residual = torch.randn(40, 20, 3).to(stream).transpose(1, 2)
    with torch.set_grad_enabled(gradients):
        output = headwise_memory(*arguments, None, 4, residual=residual, backend="native")
        alone = headwise_memory(*arguments, None, 4, backend="native")
    assert output.dtype == stream and torch.equal(output, (residual + alone).to(stream))


def test_tensors_that_lie_otherwise_give_the_same_bits():
    arguments = inputs(own=True)
    expected = output_and_gradients(arguments, 4)

    def laid(tensor):
        return torch.stack([tensor, tensor], dim=-1)[..., 0]

    strided = [arguments[0].transpose(0, 1).contiguous().transpose(0, 1), *map(laid, arguments[1:])]
    assert not any(tensor.is_contiguous() for tensor in strided)
    for moved in (strided, [laid(arguments[0]), *arguments[1:]]):
        assert all(torch.equal(a, b) for a, b in zip(output_and_gradients(moved, 4), expected, strict=True))


def test_gradients_that_lie_otherwise_give_the_same_bits():
    arguments = inputs()
    upstream = torch.randn(40, 20, 3).transpose(1, 2)
    results = []
    for given in (upstream, upstream.contiguous(), upstream.double().contiguous()):
        leaves = [argument.detach().requires_grad_() for argument in arguments]
        residual = torch.zeros(40, 3, 20, dtype=given.dtype)
        output = headwise_memory(*leaves, None, 4, residual=residual, backend="native")
        results.append(torch.autograd.grad(output, leaves, given))
    for others in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(results[0], others, strict=True))


@pytest.mark.parametrize("gradients", [True, False])
def test_it_is_what_runs_where_nobody_chose(gradients):
    arguments = inputs()
    with torch.set_grad_enabled(gradients):
        chosen = headwise_memory(*arguments, None, 4)
        assert torch.equal(chosen, headwise_memory(*arguments, None, 4, backend="native"))
        with op_choices(backend="native"):
            assert torch.equal(chosen, headwise_memory(*arguments, None, 4))


@pytest.mark.parametrize(
    "options",
    [{"selection": "cartesian"}, {"backward": "atomic"}, {"backward": "dedup"}, {"dtype": torch.float16}],
    ids=str,
)
def test_what_it_does_not_do_is_left_to_pytorch_where_nobody_chose(options, monkeypatch):
    asked = []
    monkeypatch.setitem(
        headwise_memory.__globals__, "headwise_lookup_op", lambda *given: (asked.append(given[-1]), lookup(*given))[1]
    )
    ways = {name: way for name, way in options.items() if name != "dtype"}
    headwise_memory(*inputs(dtype=options.get("dtype", torch.float32)), None, 4, **ways)
    headwise_memory(*inputs(n=65, heads=1), None, 65)
    headwise_memory(*(tensor.to("meta") for tensor in inputs()), None, 4)
    assert asked == ["torch"] * 3


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dtype": torch.float64}, "the tensors are float64; expected float32 or bfloat16"),
        ({"device": "meta"}, "the tensors are on meta; expected cpu"),
        ({"n": 65, "k": 65}, "k is 65; expected 64 or less"),
        ({"n": 40000, "k": 4, "device": "virtual"}, "n is 40000; expected 32768 or less"),
    ],
    ids=["dtype", "device", "k", "n"],
)
def test_what_it_cannot_take_is_refused(change, message):
    change = dict(change)
    k, device = change.pop("k", 4), change.pop("device", "cpu")
    n = change.get("n", 12)
    if device == "virtual":  # a bank of so many rows that takes no memory
        query, row_keys, column_keys, _ = inputs(n=2)
        row_keys, column_keys = (keys[:, :1].expand(-1, n, -1) for keys in (row_keys, column_keys))
        arguments = [query, row_keys, column_keys, torch.zeros(1, 20).expand(n * n, -1)]
    else:
        arguments = [tensor.to(device) for tensor in inputs(**change)]
    with pytest.raises(ValueError, match=f"backend is 'native', but {message}, or choose 'torch'"):
        headwise_memory(*arguments, None, k, backend="native")


def test_no_tokens_are_no_trouble():
    arguments = inputs(tokens=0)
    output, into_query, into_row_keys, into_column_keys, into_bank = output_and_gradients(arguments, 4)
    assert output.shape == (0, 3, 20) and into_query.shape == (0, 3, 16)
    assert not (into_row_keys.any() or into_column_keys.any() or into_bank.any())


def test_tensors_without_memory_are_not_read():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.no_grad():
        arguments = [torch.empty(argument.shape) for argument in inputs(tokens=2)]
        assert headwise_memory(*arguments, None, 4).shape == (2, 3, 20)


def test_a_graph_holds_it_and_gives_the_same_bits():
    arguments = inputs(tokens=30)
    torch._dynamo.reset()
    compiled = torch.compile(headwise_memory, fullgraph=True, backend="aot_eager")
    leaves = [argument.requires_grad_() for argument in arguments]
    output, eager = compiled(*leaves, None, 4), headwise_memory(*leaves, None, 4, backend="native")
    assert torch.equal(output, eager)
    upstream = torch.randn_like(output)
    both = (torch.autograd.grad(made, leaves, upstream) for made in (output, eager))
    assert all(torch.equal(one, other) for one, other in zip(*both, strict=True))
    torch._dynamo.reset()


def test_it_is_registered_rightly_in_half_precision():
    arguments = [argument.requires_grad_() for argument in inputs(tokens=6, dtype=torch.bfloat16)]
    torch.library.opcheck(headwise_lookup_op, (*arguments, None, 3, 0.5, False, "two-stage", "sorted", "native"))

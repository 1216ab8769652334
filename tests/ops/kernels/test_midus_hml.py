"""The fast bodies of head-wise memory: where values are transformed, dtypes, and sums of many terms."""

import itertools

import pytest
import torch
from ops.laws import assert_equals_reference, leaves_of
from ops.table import DEVICE, OPS, drawn, looked_up, memory
from pairs import by_default

from midus_hf.ops import headwise_memory
from midus_hf.ops.product_key import triton as gradients

OP = OPS["head-wise memory, shared bank"]


def expands(monkeypatch, whether):
    """Let values be transformed before they are gathered, or behind."""
    name, value = (
        ("_TOKENS_PER_SLOT_EXPANDED", dict.fromkeys(("native", "torch", "triton"), 0))
        if whether
        else ("MAX_EXPANDED", 0)
    )
    monkeypatch.setitem(headwise_memory.__globals__, name, value)


def test_values_are_transformed_first_for_many_tokens(body, monkeypatch):
    enough = 48 if body == "native" else 16
    few, many = (looked_up(tokens, 2, 4, 4, 8, transform=True) for tokens in (enough - 1, enough))
    for arguments, expand in ((few, False), (many, True)):
        chosen = memory(arguments, body)
        with monkeypatch.context() as patched:
            expands(patched, expand)
            assert torch.equal(chosen, memory(arguments, body))


@pytest.mark.parametrize("transform", [False, True])
def test_residual_is_added_and_gets_the_gradient(body, transform):
    arguments = looked_up(11, 3, 4, 5, 6, transform=transform)
    residual = torch.randn(11, 3, 6, device=DEVICE, requires_grad=True)
    output = memory(arguments, body, residual=residual)
    expected = residual + memory(arguments, "reference")
    torch.testing.assert_close(output, expected)
    upstream = torch.randn_like(output)
    assert torch.equal(torch.autograd.grad(output, residual, upstream)[0], upstream)


EVERY = itertools.product([torch.float32, torch.bfloat16, torch.float16], [False, True])
NARROW = by_default([(torch.bfloat16, True), (torch.float16, False)], EVERY)


@pytest.mark.parametrize(("dtype", "transform"), NARROW, ids=str)
def test_gradients_of_shared_slots_stay_accurate(body, dtype, transform):
    """The worst skew. Sums of so many terms must not be kept in half precision."""
    if body == "native" and dtype == torch.float16:
        pytest.skip("C does not compute in it")
    arguments = looked_up(1, 2, 8, 4, 8, transform=transform, dtype=dtype)
    tokens = 1000 if body == "triton" else 8192
    arguments["query"] = arguments["query"].expand(tokens, -1, -1)
    along = torch.rand(tokens, 2, 8, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    # What is rounded of one token is rounded alike of all, and does not average out.
    assert_equals_reference(OP, arguments, body, along, slack=4 if transform else 1)


@pytest.mark.parametrize("tokens", [9, 16], ids=["transformed-after", "transformed-before"])
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16], ids=["float32-stream", "bfloat16-stream"])
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_residual_keeps_dtype_and_bits(body, tokens, stream, autocast):
    arguments = looked_up(tokens, 2, 4, 4, 6, transform=True)
    arguments |= {"query": arguments["query"].bfloat16(), "bank": arguments["bank"] * 0}
    residual = torch.randn(tokens, 2, 6, device=DEVICE).to(stream)
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=autocast):
        output = memory(arguments, body, residual=residual)
    assert output.dtype == stream
    assert torch.equal(output, residual)


def test_tables_are_cast_to_the_query_and_gradients_back(body):
    leaves = leaves_of(looked_up(20, 2, 8, 6, 8, transform=True)) | {"query": drawn(20, 2, 16, seed=4).bfloat16()}
    output = memory(leaves, body)
    lowered = memory({name: leaf.bfloat16() for name, leaf in leaves.items()}, body)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, lowered)
    output.sum().backward()
    tables = [leaf for name, leaf in leaves.items() if name != "query"]
    assert all(table.grad.dtype == torch.float32 and table.grad.any() for table in tables)


@pytest.mark.parametrize("n", [6, 70], ids=["sums-in-registers", "sums-in-memory"])
def test_programs_sum_gradients_of_many_tokens(n, monkeypatch):
    monkeypatch.setattr(gradients, "_MAX_PROGRAMS", 4)  # two per head, of two blocks of tokens, the last one empty
    assert_equals_reference(OP, looked_up(140, 2, 4, n, 4), "triton")

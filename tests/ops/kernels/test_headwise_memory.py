"""The fast bodies of head-wise memory against the float64 reference: output and every gradient."""

import itertools

import pytest
import torch
from ops.kernels.closeness import assert_close
from ops.kernels.conftest import DEVICE
from pairs import by_default

from midus_hf.ops import headwise_memory, op_choices
from midus_hf.ops.dispatch.native.library import why_missing
from midus_hf.ops.product_key.triton import gradients

NAMES = ("output", "query", "row_keys", "column_keys", "value_bank", "value_transform")


@pytest.fixture
def backend(body) -> str:
    return body


def inputs(tokens, heads, dim, n, width, own=False, transform=False, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, heads, dim), (heads, n, dim // 2), (heads, n, dim // 2)]
    shapes += [((heads,) if own else ()) + (n * n, width), *([(heads, width, width)] if transform else [])]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    for keys in tensors[1:3]:
        keys /= dim**0.5  # scores of order one, whatever the width
    tensors = [tensor.to(DEVICE, dtype) for tensor in tensors]
    return tensors if transform else [*tensors, None]


def output_and_gradients(arguments, k, dtype=None, upstream=None, **options):
    leaves = [x if x is None else x.detach().to(dtype or x.dtype).requires_grad_() for x in arguments]
    output = headwise_memory(*leaves, k, **options)
    if upstream is None:
        upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    keywords = [leaf for leaf in leaves if leaf is not None]
    gradients = torch.autograd.grad(output, keywords, upstream.to(arguments[0].dtype).to(output.dtype))
    return output.detach(), *gradients


def assert_equals_reference(arguments, k, backend, upstream=None, slack=1, **options):
    actual = output_and_gradients(arguments, k, upstream=upstream, backend=backend, **options)
    expected = output_and_gradients(arguments, k, torch.float64, upstream, backend="reference")
    for name, fast, exact in zip(NAMES, actual, expected, strict=False):
        assert_close(name, fast, exact, arguments[0].dtype, slack)


def expands(monkeypatch, whether):
    """Let values be transformed before they are gathered, or behind."""
    name, value = (
        ("_TIMES_EXPANDED", dict.fromkeys(("native", "torch", "triton"), 0)) if whether else ("MOST_EXPANDED", 0)
    )
    monkeypatch.setitem(headwise_memory.__globals__, name, value)


@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "n", "width", "k", "transform"),
    [
        (33, 2, 16, 64, 16, 1, False),
        (5, 1, 256, 16, 256, 8, False),
        (9, 2, 20, 40, 133, 32, True),
        (20, 2, 16, 7, 9, 5, False),
    ],
)
def test_any_number_of_slots(tokens, heads, dim, n, width, k, transform, backend, monkeypatch):
    expands(monkeypatch, False)
    assert_equals_reference(inputs(tokens, heads, dim, n, width, transform=transform), k, backend)


@pytest.mark.parametrize("expand", [False, True])
def test_transforming_before_or_after_gathering(backend, expand, monkeypatch):
    expands(monkeypatch, expand)
    assert_equals_reference(inputs(30, 3, 16, 6, 8, transform=True), 3, backend)


def test_values_are_transformed_first_where_there_are_more_tokens_than_slots(backend, monkeypatch):
    enough = 48 if backend == "native" else 16
    few, many = (inputs(tokens, 2, 8, 4, 8, transform=True) for tokens in (enough - 1, enough))
    for arguments, expand in ((few, False), (many, True)):
        chosen = headwise_memory(*arguments, 2, backend=backend)
        with monkeypatch.context() as patched:
            expands(patched, expand)
            assert torch.equal(chosen, headwise_memory(*arguments, 2, backend=backend))


@pytest.mark.parametrize("transform", [False, True])
def test_a_residual_is_added_and_gets_the_gradient_as_it_is(backend, transform):
    arguments = inputs(11, 3, 8, 5, 6, transform=transform)
    residual = torch.randn(11, 3, 6, device=DEVICE, requires_grad=True)
    output = headwise_memory(*arguments, 2, residual=residual, backend=backend)
    expected = residual + headwise_memory(*arguments, 2, backend="reference")
    torch.testing.assert_close(output, expected)
    upstream = torch.randn_like(output)
    assert torch.equal(torch.autograd.grad(output, residual, upstream)[0], upstream)


@pytest.mark.parametrize(
    ("dtype", "transform"),
    by_default(
        [(torch.bfloat16, True), (torch.float16, False)],
        itertools.product([torch.float32, torch.bfloat16, torch.float16], [False, True]),
    ),
    ids=str,
)
def test_gradients_stay_accurate_when_every_token_retrieves_the_same_slots(backend, dtype, transform):
    """The worst skew. Sums of so many terms must not be kept in half precision."""
    if backend == "native" and dtype == torch.float16:
        pytest.skip("C does not compute in it")
    one, *tables = inputs(1, 2, 16, 4, 8, transform=transform, dtype=dtype)
    tokens = 1000 if backend == "triton" else 8192
    upstream = torch.rand(tokens, 2, 8, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    # What is rounded of one token is rounded alike of all, and does not average out.
    assert_equals_reference([one.expand(tokens, -1, -1), *tables], 4, backend, upstream, slack=4 if transform else 1)


def test_choices_stand_for_what_a_caller_leaves_open(monkeypatch):
    seen = []

    def record(*arguments):
        seen.append(arguments[-1])
        raise InterruptedError

    monkeypatch.setitem(headwise_memory.__globals__, "headwise_lookup_op", record)
    arguments = inputs(2, 1, 4, 3, 2)
    with op_choices(backend="triton"), pytest.raises(InterruptedError):
        headwise_memory(*arguments, 2)
    with op_choices(backend="triton"), pytest.raises(InterruptedError):
        headwise_memory(*arguments, 2, backend="torch")
    with pytest.raises(InterruptedError):
        headwise_memory(*arguments, 2)
    auto = "triton" if DEVICE == "cuda" else "torch" if why_missing() else "native"
    assert seen == ["triton", "torch", auto]


@pytest.mark.parametrize("tokens", [9, 16], ids=["transformed-after", "transformed-before"])
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16], ids=["float32-stream", "bfloat16-stream"])
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_the_stream_keeps_its_dtype_and_its_bits_whatever_the_tables_are(backend, tokens, stream, autocast):
    query, row_keys, column_keys, bank, transform = inputs(tokens, 2, 8, 4, 6, transform=True)
    residual = torch.randn(tokens, 2, 6, device=DEVICE).to(stream)
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=autocast):
        output = headwise_memory(
            query.bfloat16(), row_keys, column_keys, bank * 0, transform, 3, residual=residual, backend=backend
        )
    assert output.dtype == stream and torch.equal(output, residual)


def test_tables_are_read_in_the_dtype_of_the_query_and_get_gradients_in_their_own(backend):
    query, *tables = inputs(20, 2, 16, 6, 8, transform=True)
    leaves = [query.bfloat16(), *(table.requires_grad_() for table in tables)]
    output = headwise_memory(*leaves, 3, backend=backend)
    lowered = headwise_memory(*(leaf.bfloat16() for leaf in leaves), 3, backend=backend)
    assert output.dtype == torch.bfloat16 and torch.equal(output, lowered)
    output.sum().backward()
    assert all(table.grad.dtype == torch.float32 and table.grad.any() for table in tables)


@pytest.mark.parametrize("n", [6, 70], ids=["sums-in-registers", "sums-in-memory"])
def test_programs_add_up_the_gradients_of_many_tokens(n, monkeypatch):
    monkeypatch.setattr(gradients, "_PROGRAMS", 4)  # two per head, of two blocks of tokens, the last one empty
    assert_equals_reference(inputs(140, 2, 8, n, 4), 2, "triton")


@pytest.mark.parametrize("n", [8, 48, 300])
def test_a_query_that_is_not_finite_spoils_its_own_output_alone(backend, n):
    """A run that diverged must end in a loss that is not finite, not in a read outside the bank."""
    query, *tables, _ = inputs(6, 2, 8, n, 4)
    spoiled = query.clone()
    spoiled[1, 0], spoiled[4, 1] = float("nan"), float("inf")
    tables = [table.requires_grad_() for table in tables]
    output = headwise_memory(spoiled, *tables, None, 3, backend=backend)
    good = [0, 2, 3, 5]
    assert torch.equal(output[good], headwise_memory(query, *tables, None, 3, backend=backend)[good])
    assert output[1, 0].isnan().all()
    output.sum().backward()
    assert all(table.grad.shape == table.shape for table in tables)

"""Ops in C: each token by itself, tables of any size, and nothing read out of bounds."""

import math
import subprocess
import sys

import pytest
import torch
from ops.table import looked_up

from midus_hf.ops import headwise_memory, product_key_topk, weighted_gather
from midus_hf.ops.dispatch.library import ROW_SUMS_CALL, native_library
from midus_hf.ops.gather.native import (
    native_bank_gradient,
    native_gathered_products,
    native_row_sums,
    native_weighted_rows,
)
from midus_hf.ops.midus_hml.op import headwise_lookup_op
from midus_hf.ops.product_key.native import LookupInputs, native_lookup

pytestmark = pytest.mark.usefixtures("library")


def inputs(tokens=40, **sizes):
    return list(looked_up(tokens, **sizes).values())


def retrieved(arguments, k=4, **options):
    """Of one bank per head, or of one that heads share, whose rows are transformed after they are gathered, if at all."""
    keywords = arguments if len(arguments) == 5 else [*arguments, None]
    return headwise_memory(*keywords, k, backend="native", **options)


def test_threads_are_started_without_openmp(tmp_path):
    """As without OpenMP, which PyTorch brings: another process, without PyTorch, gets the same bits by two threads."""
    generator = torch.Generator().manual_seed(0)
    gradient, weights = (torch.randn(500, 3, last, generator=generator) for last in (20, 4))
    slots = torch.randint(36, (500, 3, 4), generator=generator, dtype=torch.int16)
    expected = native_bank_gradient(gradient, slots, weights, torch.Size((3, 36, 20)))
    for name, tensor in {"gradient": gradient, "slots": slots, "weights": weights}.items():
        (tmp_path / name).write_bytes(tensor.numpy().tobytes())
    code = """
import ctypes, pathlib, struct, sys
layout, library, folder = sys.argv[1], ctypes.CDLL(sys.argv[2]), pathlib.Path(sys.argv[3])
assert not hasattr(ctypes.CDLL(None), "GOMP_parallel")
given = [ctypes.create_string_buffer((folder / name).read_bytes()) for name in ("gradient", "slots", "weights")]
into = ctypes.create_string_buffer(4 * 3 * 36 * 20)
numbers = (500, 3, 36, 20, 4, 60, 20, 36 * 20, 0, 2, 2)
call = struct.pack(layout, *map(ctypes.addressof, (*given, into)), *numbers)
assert library.midus_row_sums(call) == 0
(folder / "sums").write_bytes(into.raw)
"""
    words = [ROW_SUMS_CALL.format, native_library()._name, str(tmp_path)]
    subprocess.run([sys.executable, "-c", code, *words], check=True, timeout=120)
    assert (tmp_path / "sums").read_bytes() == expected.numpy().tobytes()


def test_first_of_equal_slots_is_retrieved():
    query, row_keys, column_keys, bank = inputs(tokens=3, heads=1, n=9)
    zeros = LookupInputs(query, row_keys * 0, column_keys * 0, bank, None, None, 4)
    _, (slots, weights) = native_lookup(zeros, True)
    assert torch.equal(weights, torch.full((3, 1, 4), 0.25))
    assert set(slots.flatten().tolist()) <= {row * 9 + column for row in range(4) for column in range(4)}
    assert all(len(set(of_token.flatten().tolist())) == 4 and 0 in of_token for of_token in slots)


BANKS = pytest.mark.parametrize(
    "bank", [{}, {"own": True}, {"transform": True}], ids=["shared-bank", "bank-per-head", "transformed"]
)


@BANKS
def test_other_tokens_change_no_bit(bank):
    arguments = inputs(tokens=77, **bank)
    whole = retrieved(arguments)
    with torch.no_grad():
        one_by_one = [retrieved([token[None], *arguments[1:]]) for token in arguments[0]]
    assert torch.equal(whole, torch.cat(one_by_one))


@pytest.mark.parametrize("tokens", [2, 300])
@pytest.mark.parametrize("side", [1, 2], ids=["row key", "column key"])
def test_nan_key_gives_nan_for_its_head(side, tokens):
    arguments = inputs(tokens=tokens)
    arguments[side][0, 0, 0] = math.nan
    output = retrieved(arguments)
    assert output[:, 0].isnan().all()
    assert not output[:, 1:].isnan().any()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_non_finite_scores_read_nothing_outside(value):
    arguments = inputs(own=True)
    arguments[1][:, ::2] = value
    arguments[2][:, 1:] = -value
    _, (slots, _) = native_lookup(LookupInputs(*arguments, None, None, 4), True)
    assert slots.min() >= 0
    assert slots.max() < 144
    leaves = [argument.requires_grad_() for argument in arguments]
    torch.autograd.grad(retrieved(leaves).sum(), leaves)


@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(("gradients", "transform"), [(True, False), (False, True)])
def test_residual_of_any_dtype_is_added_after_rounding(stream, gradients, transform):
    arguments = inputs(dtype=torch.bfloat16, transform=transform)
    residual = torch.randn(40, 20, 3).to(stream).transpose(1, 2)
    with torch.set_grad_enabled(gradients):
        output = retrieved(arguments, residual=residual)
        alone = retrieved(arguments)
    assert output.dtype == stream
    assert torch.equal(output, (residual + alone).to(stream))


@BANKS
def test_gradient_layout_changes_no_bit(bank):
    upstream, results = torch.randn(40, 20, 3).transpose(1, 2), []
    for gradient in (upstream, upstream.contiguous(), upstream.double().contiguous()):
        leaves = [argument.requires_grad_() for argument in inputs(**bank)]
        output = retrieved(leaves, residual=torch.zeros(40, 3, 20, dtype=gradient.dtype))
        results.append(torch.autograd.grad(output, leaves, gradient))
    for others in results[1:]:
        assert all(map(torch.equal, results[0], others))


def test_unsupported_sizes_run_in_pytorch_by_default(monkeypatch):
    calls = []

    def noted(*arguments):
        calls.append(arguments[-1])
        return headwise_lookup_op(*arguments)

    monkeypatch.setitem(headwise_memory.__globals__, "headwise_lookup_op", noted)
    headwise_memory(*inputs(n=65, heads=1), None, 65)
    headwise_memory(*(tensor.to("meta") for tensor in inputs()), None, 4)
    assert product_key_topk(*inputs(n=65)[:3], 65)[1].shape == (40, 3, 65)
    assert calls == ["torch"] * 2


def test_unsupported_arguments_are_refused():
    query, row_keys, column_keys, bank = inputs()
    many = [keys[:, :1].expand(-1, 40000, -1) for keys in (row_keys, column_keys)]  # which take no memory
    for arguments, k, message in (
        ([tensor.to("meta") for tensor in inputs()], 4, "the tensors are on meta; expected cpu"),
        (inputs(n=65), 65, "k is 65; expected 64 or less"),
        ([query, *many, bank[:1].expand(40000**2, -1)], 4, "n is 40000; expected 32768 or less"),
    ):
        message = f"backend is 'native', but {message}, or choose 'torch'"
        with pytest.raises(ValueError, match=message):
            headwise_memory(*arguments, None, k, backend="native")
        with pytest.raises(ValueError, match=message):
            product_key_topk(*arguments[:3], k, backend="native")


def gathered_inputs(tokens=90, m=7, rows=40, width=150, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    bank, vectors = (torch.randn(count, width, generator=generator).to(dtype) for count in (rows, tokens))
    slots = torch.randint(rows, (tokens, m), generator=generator)
    return bank, vectors, slots, torch.randn(tokens, m, generator=generator)


def all_three(bank, vectors, slots, weights):
    return (
        native_weighted_rows(bank, slots, weights),
        native_row_sums(vectors, slots, weights, len(bank)),
        native_gathered_products(vectors, bank, slots),
    )


def test_table_larger_than_the_cache_gives_the_same_bits():
    """They are read row by row, and smaller ones some columns at a time."""
    bank, _, slots, weights = gathered_inputs()
    large = torch.zeros(40000, 150)
    large[:40] = bank
    assert torch.equal(native_weighted_rows(large, slots, weights), native_weighted_rows(bank, slots, weights))


@pytest.mark.parametrize("kind", [torch.int16, torch.int32, torch.int64, torch.uint8], ids=str)
def test_any_integer_dtype_of_slots_is_read(kind):
    bank, vectors, slots, weights = gathered_inputs()
    expected = all_three(bank, vectors, slots, weights)
    strided = (tensor.T.contiguous().T for tensor in (bank, vectors, slots.to(kind)))
    assert all(map(torch.equal, all_three(*strided, weights.double()), expected))


@pytest.mark.parametrize("outside", [-1, 40, 1 << 40])
def test_slots_outside_the_bank_are_refused(outside):
    bank, vectors, slots, weights = gathered_inputs()
    slots[3, 2] = outside
    message = "slots are outside the bank; expected 0 <= slot < its rows. Check the code that made them"
    for call in (
        lambda: native_weighted_rows(bank, slots, weights),
        lambda: native_row_sums(vectors, slots, weights, 40),
        lambda: native_gathered_products(vectors, bank, slots),
        lambda: weighted_gather(bank, slots, weights),
    ):
        with pytest.raises(IndexError, match=message):
            call()

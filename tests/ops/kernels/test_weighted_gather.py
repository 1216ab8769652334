"""The fast bodies of weighted gathering against the float64 reference: output and both gradients."""

import pytest
import torch
from ops.kernels.closeness import assert_close
from ops.kernels.conftest import DEVICE
from ops.kernels.gathering import DTYPES, SIZES
from pairs import in_pairs

from midus_hf.ops import weighted_gather


@pytest.fixture
def backend(body) -> str:
    return body


def inputs(tokens, m, rows, width, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randint(rows, (tokens, m), generator=generator).to(DEVICE)
    bank, weights = (
        torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in ((rows, width), (tokens, m))
    )
    return bank, slots, weights


def output_and_gradients(bank, slots, weights, dtype=None, **options):
    bank, weights = (x.detach().to(dtype or x.dtype).requires_grad_() for x in (bank, weights))
    output = weighted_gather(bank, slots, weights, **options)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(DEVICE, output.dtype)
    return output.detach(), *torch.autograd.grad(output, (bank, weights), upstream)


def assert_equals_reference(arguments, **options):
    found = output_and_gradients(*arguments, **options)
    expected = output_and_gradients(*arguments, torch.float64, backend="reference")
    for name, fast, exact in zip(("output", "bank", "weights"), found, expected, strict=True):
        assert_close(name, fast, exact, arguments[0].dtype)


@pytest.mark.parametrize("size, dtype, backend", in_pairs(SIZES, DTYPES, ("torch", "triton")), ids=str)
def test_every_size_and_dtype(size, dtype, backend):
    assert_equals_reference(inputs(*SIZES[size], dtype), backend=backend)


@pytest.mark.usefixtures("in_c")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_every_size_in_c(size, dtype):
    assert_equals_reference(inputs(*SIZES[size], dtype), backend="native")


@pytest.mark.usefixtures("in_c")
def test_half_precision_of_ieee_is_refused_in_c():
    with pytest.raises(ValueError, match="tensors are float16; expected float32 or bfloat16, or choose 'torch'"):
        weighted_gather(*inputs(*SIZES["small"], torch.float16), backend="native")


def test_one_row_hit_by_every_entry(backend):
    bank, slots, weights = inputs(700, 6, 5, 8)
    assert_equals_reference((bank, torch.full_like(slots, 3), weights), backend=backend)


def test_rows_that_nothing_hits_get_a_gradient_of_zero(backend):
    bank, slots, weights = inputs(20, 3, 40, 8)
    _, into_bank, _ = output_and_gradients(bank, slots % 2 * 39, weights, backend=backend)
    assert into_bank[[0, 39]].all() and not into_bank[1:39].any()


def test_two_runs_give_the_same_bytes(backend):
    arguments = inputs(300, 8, 20, 16)
    first, second = (output_and_gradients(*arguments, backend=backend) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("leading", [(), (0,), (2, 3)], ids=str)
def test_any_leading_shape(backend, leading):
    bank = torch.randn(6, 4, device=DEVICE, requires_grad=True)
    slots = torch.zeros(*leading, 3, dtype=torch.int64, device=DEVICE)
    output = weighted_gather(bank, slots, torch.ones(*leading, 3, device=DEVICE), backend=backend)
    assert output.shape == (*leading, 4)
    output.sum().backward()
    assert bank.grad.shape == bank.shape


def test_a_sparse_gradient_holds_the_rows_that_were_hit(backend):
    bank, slots, weights = inputs(10, 3, 100, 8)
    dense = output_and_gradients(bank, slots, weights, backend=backend)
    sparse = output_and_gradients(bank, slots, weights, backend=backend, sparse_gradient=True)
    assert torch.equal(sparse[0], dense[0]) and torch.equal(sparse[2], dense[2])
    assert sparse[1].is_coalesced()
    assert sparse[1].indices().flatten().tolist() == sorted(set(slots.flatten().tolist()))
    torch.testing.assert_close(sparse[1].to_dense(), dense[1])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"bank": torch.zeros(3)}, r"bank is \(3,\); expected \[rows, width\]"),
        ({"weights": torch.zeros(2, 3)}, r"slots is \(2, 2\) and weights \(2, 3\); expected equal shapes"),
    ],
)
def test_wrong_arguments_are_refused(changes, message):
    arguments = {
        "bank": torch.zeros(3, 2),
        "slots": torch.zeros(2, 2, dtype=torch.int64),
        "weights": torch.zeros(2, 2),
    }
    with pytest.raises(ValueError, match=message):
        weighted_gather(**{**arguments, **changes})

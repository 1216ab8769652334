"""The fast bodies of gathered products against the float64 reference: output and both gradients."""

import pytest
import torch
from ops.kernels.closeness import assert_close
from ops.kernels.conftest import DEVICE
from ops.kernels.gathering import DTYPES, SIZES
from pairs import in_pairs

from midus_hf.ops.gather.products import gathered_products, gathered_products_op


@pytest.fixture
def backend(body) -> str:
    return body


def inputs(tokens, m, rows, width, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    slots = torch.randint(rows, (tokens, m), generator=generator).to(DEVICE)
    vectors, bank = (
        torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in ((tokens, width), (rows, width))
    )
    return vectors, bank, slots


def output_and_gradients(vectors, bank, slots, dtype=None, **options):
    vectors, bank = (x.detach().to(dtype or x.dtype).requires_grad_() for x in (vectors, bank))
    output = gathered_products(vectors, bank, slots, **options)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(DEVICE, output.dtype)
    return output.detach(), *torch.autograd.grad(output, (vectors, bank), upstream)


def assert_equals_reference(arguments, **options):
    found = output_and_gradients(*arguments, **options)
    expected = output_and_gradients(*arguments, torch.float64, backend="reference")
    dtypes = torch.float32, arguments[0].dtype, arguments[0].dtype  # products are never rounded to the table's dtype
    for name, fast, exact, dtype in zip(("output", "vectors", "bank"), found, expected, dtypes, strict=True):
        assert fast.dtype == dtype, name
        assert_close(name, fast, exact, dtype)


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
        gathered_products(*inputs(*SIZES["small"], torch.float16), backend="native")


def test_rows_that_nothing_reads_get_a_gradient_of_zero(backend):
    vectors, bank, slots = inputs(20, 3, 40, 8)
    _, _, into_bank = output_and_gradients(vectors, bank, slots % 2 * 39, backend=backend)
    assert into_bank[[0, 39]].all() and not into_bank[1:39].any()


def test_two_runs_give_the_same_bytes(backend):
    arguments = inputs(40, 8, 20, 16)
    first, second = (output_and_gradients(*arguments, backend=backend) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("sparse_gradient", [False, True])
@pytest.mark.parametrize("leading", [(), (0,), (2, 0), (2, 3)], ids=str)
def test_any_leading_shape(backend, leading, sparse_gradient):
    vectors = torch.ones(*leading, 4, device=DEVICE, requires_grad=True)
    bank = torch.ones(6, 4, device=DEVICE, requires_grad=True)
    slots = torch.zeros(*leading, 3, dtype=torch.int64, device=DEVICE)
    output = gathered_products(vectors, bank, slots, backend=backend, sparse_gradient=sparse_gradient)
    assert torch.equal(output, torch.full((*leading, 3), 4.0, device=DEVICE))
    output.sum().backward()
    assert torch.equal(vectors.grad, torch.full_like(vectors, 3))
    expected = torch.zeros(6, 4, device=DEVICE)
    expected[0] = slots.numel()
    assert torch.equal(bank.grad.to_dense(), expected)


def test_a_sparse_gradient_holds_the_rows_that_were_read(backend):
    arguments = inputs(10, 3, 100, 8)
    dense = output_and_gradients(*arguments, backend=backend)
    sparse = output_and_gradients(*arguments, backend=backend, sparse_gradient=True)
    assert torch.equal(sparse[0], dense[0]) and torch.equal(sparse[1], dense[1])
    assert sparse[2].is_coalesced()
    assert sparse[2].indices().flatten().tolist() == sorted(set(arguments[2].flatten().tolist()))
    torch.testing.assert_close(sparse[2].to_dense(), dense[2])


def test_they_are_registered_rightly_and_one_node(backend):
    vectors, bank, slots = inputs(5, 3, 7, 4)
    torch.library.opcheck(gathered_products_op, (vectors.requires_grad_(), bank.requires_grad_(), slots, backend))
    torch._dynamo.reset()
    names = []

    def look(graph, _):
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    call = torch.compile(lambda *tensors: gathered_products(*tensors, backend=backend), fullgraph=True, backend=look)
    call(vectors, bank, slots)
    assert sum("gathered_products" in name for name in names) == 1

"""Products of vectors with rows of a table against loops, for every body and both kinds of gradient."""

import pytest
import torch

from midus_hf.ops.gather.products import gathered_products, gathered_products_op


def drawn(dtype=torch.float64, leading=(2, 3), rows=7, width=4, m=5):
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(*leading, width, dtype=torch.float64, generator=generator).to(dtype)
    bank = torch.randn(rows, width, dtype=torch.float64, generator=generator).to(dtype)
    return vectors, bank, torch.randint(rows - 1, (*leading, m), generator=generator)  # the last row is never read


@pytest.mark.parametrize("sparse_gradient", [False, True])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_products_are_those_of_loops(backend, sparse_gradient):
    vectors, bank, slots = drawn()
    found = gathered_products(vectors, bank, slots, backend=backend, sparse_gradient=sparse_gradient)
    for b in range(2):
        for t in range(3):
            for m in range(5):
                expected = sum(vectors[b, t, v].item() * bank[slots[b, t, m], v].item() for v in range(4))
                assert found[b, t, m].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_gradients_are_right(backend):
    vectors, bank, slots = drawn()
    inputs = vectors.requires_grad_(), bank.requires_grad_()
    assert torch.autograd.gradcheck(lambda *given: gathered_products(*given, slots, backend=backend), inputs)


def test_sparse_gradients_are_the_dense_ones_of_the_rows_that_were_read():
    gradients = []
    for sparse in (False, True):
        vectors, bank, slots = drawn()
        bank.requires_grad_(), vectors.requires_grad_()
        gathered_products(vectors, bank, slots, sparse_gradient=sparse, backend="torch").square().sum().backward()
        gradients.append((vectors.grad, bank.grad))
    (into_vectors, dense), (also_into_vectors, sparse) = gradients
    assert sparse.is_sparse and not dense.is_sparse
    sparse = sparse.coalesce()
    assert sparse.indices()[0].tolist() == sorted(slots.unique().tolist())
    torch.testing.assert_close(sparse.to_dense(), dense)
    torch.testing.assert_close(also_into_vectors, into_vectors)
    assert not dense[-1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrow_tables_are_summed_in_float32(dtype):
    vectors, bank, slots = drawn(dtype, width=64)
    found = gathered_products(vectors, bank, slots)
    assert found.dtype == torch.float32
    wide = gathered_products(vectors.double(), bank.double(), slots)
    torch.testing.assert_close(found.double(), wide, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_autocast_does_not_narrow_the_products(backend):
    vectors, bank, slots = drawn(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gathered_products(vectors, bank, slots, backend=backend)
    assert found.dtype == torch.float32
    assert torch.equal(found, gathered_products(vectors, bank, slots, backend=backend))


def test_vectors_are_rounded_to_the_dtype_of_the_table():
    vectors, bank, slots = drawn(torch.float32)
    found = gathered_products(vectors, bank.bfloat16(), slots)
    assert torch.equal(found, gathered_products(vectors.bfloat16(), bank.bfloat16(), slots))
    assert found.dtype == torch.float32


def test_the_op_is_registered_and_compiles_to_one_node():
    vectors, bank, slots = drawn(torch.float32, leading=(6,))
    given = (vectors.requires_grad_(), bank.requires_grad_(), slots, "torch")
    torch.library.opcheck(gathered_products_op, given)
    compiled = torch.compile(lambda *tensors: gathered_products(*tensors), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(vectors, bank, slots), gathered_products(vectors, bank, slots))


@pytest.mark.parametrize(
    ("vectors", "bank", "slots", "message"),
    [
        (
            (2, 3),
            (5, 4),
            (2, 1),
            r"vectors is \(2, 3\) and bank \(5, 4\); expected \[\.\.\., width\] and \[rows, width\]",
        ),
        ((2, 4), (5, 2, 2), (2, 1), r"bank \(5, 2, 2\); expected"),
        ((2, 4), (5, 4), (3, 1), r"slots is \(3, 1\); expected slots for each of the vectors \(2,\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(vectors, bank, slots, message):
    with pytest.raises(ValueError, match=message):
        gathered_products(torch.zeros(vectors), torch.zeros(bank), torch.zeros(slots, dtype=torch.int64))

"""Sums of table rows by parts: against loops, in every dtype, with every gradient, and against a sum for each part alone."""

import pytest
import torch

from midus_hf.ops.gather.parted import parted_gather, reference
from midus_hf.ops.gather.weighted import weighted_gather

ROWS, WIDTH, M, PARTS = 7, 5, 6, 4


def given(tokens=(2, 3), dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    bank = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    slots = torch.randint(1, ROWS, (*tokens, M), generator=generator)  # row 0 is read by nobody
    weights = torch.randn(*tokens, M, generator=generator, dtype=torch.float64)
    parts = torch.randint(PARTS - 1, (*tokens, M), generator=generator)  # the last part is empty
    return bank, slots, weights, parts


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_it_sums_what_loops_sum(backend):
    bank, slots, weights, parts = given()
    found = parted_gather(bank, slots, weights, parts, PARTS, backend=backend)
    assert found.shape == (2, 3, PARTS, WIDTH)
    for b, t, p in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(PARTS)).tolist():
        expected = torch.zeros(WIDTH, dtype=torch.float64)
        for m in range(M):
            if parts[b, t, m] == p:
                expected += weights[b, t, m] * bank[slots[b, t, m]]
        torch.testing.assert_close(found[b, t, p], expected, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("sparse", [False, True])
def test_it_gives_what_a_sum_for_each_part_alone_gives(sparse):
    bank, slots, weights, parts = given()
    upstream = torch.randn(2, 3, PARTS, WIDTH, dtype=torch.float64)
    results = []
    for by_part in (True, False):
        leaves = bank.clone().requires_grad_(), weights.clone().requires_grad_()
        if by_part:
            output = parted_gather(leaves[0], slots, leaves[1], parts, PARTS, sparse_gradient=sparse)
        else:
            alone = [leaves[1].where(parts == part, 0) for part in range(PARTS)]
            output = torch.stack([weighted_gather(leaves[0], slots, of_part) for of_part in alone], dim=-2)
        into_bank, into_weights = torch.autograd.grad(output, leaves, upstream)
        if by_part and sparse:
            assert into_bank.indices()[0].tolist() == slots.unique().tolist()
            into_bank = into_bank.to_dense()
        results.append((output, into_bank, into_weights))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)


def test_gradients_are_right():
    bank, slots, weights, parts = given()
    leaves = bank.requires_grad_(), weights.requires_grad_()
    assert torch.autograd.gradcheck(lambda bank, weights: parted_gather(bank, slots, weights, parts, PARTS), leaves)


def test_half_precision_is_summed_in_float32():
    bank, slots, weights, parts = given(tokens=(64,), dtype=torch.bfloat16)
    found = parted_gather(bank, slots, weights.float(), parts, PARTS)
    exact = reference(bank.double(), slots, weights, parts, PARTS)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-5)


def test_it_is_one_node_of_a_graph_and_takes_no_tokens():
    torch.library.opcheck(torch.ops.midus_hf.parted_gather.default, (*given(tokens=(3,)), PARTS))
    bank, slots, weights, parts = given(tokens=(0,))
    assert parted_gather(bank, slots, weights, parts, PARTS).shape == (0, PARTS, WIDTH)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bank": torch.zeros(2, 3, 4)}, r"bank is \(2, 3, 4\); expected \[rows, width\]."),
        ({"parts": torch.zeros(2, 3, 1)}, r"slots is \(2, 3, 6\), weights \(2, 3, 6\) and parts \(2, 3, 1\); expected equal shapes."),
    ],
    ids=["bank", "parts"],
)  # fmt: skip
def test_shapes_that_disagree_are_refused(changed, message):
    arguments = dict(zip(("bank", "slots", "weights", "parts"), given(), strict=True)) | changed
    with pytest.raises(ValueError, match=message):
        parted_gather(**arguments, num_parts=PARTS)

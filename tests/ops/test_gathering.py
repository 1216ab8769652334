"""Gathered rows, and products with them, against loops, for the contract and PyTorch's body; what they refuse."""

import itertools

import pytest
import torch

from midus_hf.ops import weighted_gather
from midus_hf.ops.gather.op import gathered_products

ROWS, WIDTH, M = 7, 5, 6


def given(dtype=torch.float64, tokens=(2, 3)):
    """Make by name a bank, slots that leave row 0 out, weights and vectors."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    made = {"bank": normal(ROWS, WIDTH).to(dtype), "slots": torch.randint(1, ROWS, (*tokens, M), generator=generator)}
    return made | {"weights": normal(*tokens, M), "vectors": normal(*tokens, WIDTH).to(dtype)}


def called(name, made, backend="auto"):
    bank, slots, weights, vectors = made.values()
    if name == "sums":
        return weighted_gather(bank, slots, weights, backend=backend)
    return gathered_products(vectors, bank, slots, backend=backend)


def by_loops(name, made):
    bank, slots, weights, vectors = made.values()
    results = []
    for at in itertools.product(*map(range, slots.shape[:-1])):
        rows = [bank[slot] for slot in slots[at].tolist()]
        if name == "products":
            results.append(torch.stack([torch.dot(vectors[at], row) for row in rows]))
        else:
            results.append(sum(weight * row for weight, row in zip(weights[at], rows, strict=True)))
    return torch.stack(results).unflatten(0, slots.shape[:-1])


@pytest.mark.parametrize("name", ["sums", "products"])
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_gathering_equals_loops_and_passes_gradcheck(name, backend):
    made = given()
    torch.testing.assert_close(called(name, made, backend), by_loops(name, made), rtol=1e-13, atol=1e-14)
    wanted = ["vectors", "bank"] if name == "products" else ["bank", "weights"]

    def run(*leaves):
        return called(name, made | dict(zip(wanted, leaves, strict=True)), backend)

    assert torch.autograd.gradcheck(run, [made[leaf].requires_grad_() for leaf in wanted])


def test_vectors_are_rounded_to_the_dtype_of_the_table():
    made = given(torch.float32)
    narrow = made | {"bank": made["bank"].bfloat16()}
    result = called("products", narrow)
    assert result.dtype == torch.float32
    assert torch.equal(result, called("products", narrow | {"vectors": made["vectors"].bfloat16()}))

"""Gathered rows, and products with them, against loops; of half-precision tables, few rows are widened at a time."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from midus_hf.ops import weighted_gather
from midus_hf.ops.gather import op as gather
from midus_hf.ops.gather.op import gathered_products
from midus_hf.ops.midus_hml.op import headwise_memory
from midus_hf.ops.product_key import op as flat_key
from midus_hf.ops.product_key.op import flat_key_topk

ROWS, M = 7, 6
HEADS, N, WIDTH = 4, 16, 8
SLOTS = N * N


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


class LargestWide(TorchDispatchMode):
    """Records the elements of the largest float32 tensor that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self.largest = max(self.largest, tensor.numel())
        return result


def tables(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    shapes = {"query": (1, HEADS, WIDTH), **dict.fromkeys(("bank", "keys"), (HEADS, SLOTS, WIDTH))}
    shapes |= dict.fromkeys(("row_keys", "column_keys"), (HEADS, N, WIDTH // 2))
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def test_one_token_widens_only_gathered_rows():
    t = tables()
    with torch.no_grad(), LargestWide() as wide:
        headwise_memory(t["query"], t["row_keys"], t["column_keys"], t["bank"], None, 4, backend="torch")
    assert 0 < wide.largest <= HEADS * N * WIDTH  # all keys of a side, or the rows of four slots per head
    with LargestWide() as wide:
        gather.weighted_rows(t["bank"][0], torch.arange(8).view(1, 8), torch.ones(1, 8), "torch")
    assert wide.largest == 8 * WIDTH


@pytest.mark.parametrize(
    ("limit", "largest"),
    [("_MAX_WIDENED", SLOTS * WIDTH), ("_MAX_SCORES", HEADS * SLOTS * 12)],
    ids=["keys-of-some-heads", "scores-of-some-tokens"],
)
def test_flat_keys_are_compared_in_parts(limit, largest, monkeypatch):
    """Half-precision keys are widened some heads at a time, and scores are computed for some tokens at a time."""
    keys, generator = tables()["keys"], torch.Generator().manual_seed(2)
    query = torch.randn(1 if limit == "_MAX_WIDENED" else 20, HEADS, WIDTH, generator=generator)
    keys, query = (keys, query.bfloat16()) if limit == "_MAX_WIDENED" else (keys.float(), query)
    expected = flat_key_topk(query, keys, 3)
    monkeypatch.setattr(flat_key, limit, largest)
    with torch.no_grad(), LargestWide() as wide:
        scores, slots = flat_key_topk(query, keys, 3)
    assert wide.largest == largest
    assert torch.equal(slots, expected[1])
    torch.testing.assert_close(scores, expected[0])


def test_trained_keys_sum_gradients_in_float32():
    """In bfloat16 a sum of 4,096 equal terms stalls at 256 of them."""
    keys = torch.ones(1, 2, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    query = torch.ones(4096, 1, WIDTH, dtype=torch.bfloat16)
    scores, _ = flat_key_topk(query, keys, 2)
    scores.sum().backward()
    assert torch.equal(keys.grad.float(), torch.full_like(keys.grad, 4096.0).float())


@pytest.mark.parametrize("tokens", [1, 3, 200])
def test_gathering_first_gives_the_same_bits(tokens, monkeypatch):
    bank = tables()["bank"].flatten(0, 1)
    generator = torch.Generator().manual_seed(1)
    slots = torch.randint(len(bank), (tokens, 4), generator=generator)
    weights = torch.rand(tokens, 4, generator=generator)
    gradient = torch.randn(tokens, WIDTH, generator=generator).bfloat16()

    def computed():
        products = gather.row_products(gradient, bank, slots, "torch")
        return gather.weighted_rows(bank, slots, weights, "torch"), products

    gathered = computed()
    monkeypatch.setattr(gather, "_widened", lambda bank, slots: (bank.float(), slots))
    for tensor, whole in zip(gathered, computed(), strict=True):
        assert torch.equal(tensor, whole)

"""The memory layer of UltraMemV2 against its equations, token by token; what training keeps of it; how it starts."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from midus_hf.config.declared_tensors import ModelSizes
from midus_hf.memories.module import build_memory
from midus_hf.memories.ultramem_v2.options import UltraMemV2Options, best_scores

SIZES = ModelSizes(hidden_size=16, num_heads=2, intermediate_size=40, num_layers=4)
SMALL = {"n": 4, "k": 3, "key_width": 5, "value_width": 6, "pre_value_width": 2, "zero": "none"}
KINDS = {"plain": {}, "no-pre-values": {"pre_value_width": 0}, "heads": {"heads": 2, "rank": 3}, "rank-1": {"rank": 1}}


def build(index=0, dtype=torch.float64, **options):
    torch.manual_seed(0)
    memory = build_memory(UltraMemV2Options(**{**SMALL, **options}), SIZES, index, 4)
    with torch.no_grad():
        for name, parameter in memory.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return memory.to(dtype).eval()


def normalised(vectors, gain):
    return vectors / (vectors.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain


def by_equations(memory, state, value_table, pre_value_table, first=0):
    """What is added to one token; every pair of keys is scored."""
    options, weights = memory.options, dict(memory.named_parameters())
    query = (weights["query_projection.weight"] @ state).view(2, options.heads, options.rank, -1)
    query = normalised(query, memory.query_norm_weight)
    values = torch.zeros(value_table.shape[1], dtype=state.dtype)
    for head in range(options.heads):
        rows, columns = (  # [n, r]
            (query[side, head] * normalised(keys[head, 0], memory.key_norm_weight)).sum(-1)
            for side, keys in enumerate((memory.row_keys, memory.column_keys))
        )
        best = (rows @ memory.core[head, 0, 0] @ columns.T).flatten().topk(options.k)
        for factor, slot in zip(*best, strict=True):
            position = (slot + first) % len(value_table)
            if pre_value_table is not None:
                factor = factor * (pre_value_table[position] @ (weights["pre_projection.weight"] @ state))
            values += factor * value_table[position]
    return weights["value_projection.weight"] @ values


@pytest.mark.parametrize("kind", KINDS)
def test_ultramem_v2_matches_the_equations(kind):
    memory = build(**KINDS[kind], k=4)
    states = torch.randn(2, 3, 16, dtype=torch.float64)
    pre_values = getattr(memory, "pre_value_table", None)
    expected = [by_equations(memory, state, memory.value_table, pre_values) for state in states.flatten(0, 1)]
    torch.testing.assert_close(memory(states), torch.stack(expected).view(2, 3, 16), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("share", "index", "first"), [("ring:4", 0, 3), ("ring:4", 3, 2), ("ring:2", 3, 3), ("all", 2, 0)]
)
def test_layer_reads_its_segment_of_a_shared_table(share, index, first):
    memory = build(index, share=share, k=8)
    tables = memory.options.tables(SIZES, (0, 1, 2, 3))[0]
    shapes = {name: tensor.shape for name, tensor in tables.tensors.items()}
    arguments = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    state = torch.randn(16, dtype=torch.float64)
    expected = by_equations(memory, state, arguments["value_table"], arguments["pre_value_table"], first * 16)
    torch.testing.assert_close(memory(state[None, None], tables=arguments)[0, 0], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_ultramem_v2_gradients_match_finite_differences(kind):
    memory = build(**KINDS[kind])
    state = torch.randn(1, 2, 16, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*memory.named_parameters(), strict=True)

    def output(state, *values):
        return torch.func.functional_call(memory, dict(zip(names, values, strict=True)), (state,))

    assert torch.autograd.gradcheck(output, (state, *parameters), eps=1e-7, atol=1e-5, rtol=1e-4, fast_mode=True)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_training_stores_singular_vectors_once(use_reentrant):
    memory, states = build(), torch.randn(2, 3, 16, dtype=torch.float64, requires_grad=True)
    start = memory.row_vector.clone()
    memory(states)
    memory.train().retrieve(states)
    assert torch.equal(memory.row_vector, start)
    memory(states)
    kept = memory.row_vector.clone()
    u = torch.linalg.svd(memory.core)[0][..., 0]
    assert torch.allclose(kept.abs(), u.abs())
    assert not torch.equal(kept, start)
    with torch.no_grad():
        memory.row_vector.copy_(start)
    output = checkpoint(memory, states, use_reentrant=use_reentrant)
    with torch.no_grad():
        memory.row_vector.fill_(0.5)  # so that it shows if the pass that is repeated keeps its own
    output.sum().backward()
    assert (memory.row_vector == 0.5).all()


def test_stale_singular_vectors_do_not_matter():
    """Whoever changes a core, by any route, changes what the first stage keeps at once."""
    memory, states = build(rank=3), torch.randn(4, 5, 16, dtype=torch.float64)
    with torch.no_grad():
        memory.core.copy_(torch.rand_like(memory.core))
        expected = memory(states)
        memory.row_vector.copy_(memory.row_vector + 0.3 * torch.rand_like(memory.row_vector))
        torch.testing.assert_close(memory(states), expected)


@pytest.mark.parametrize("way", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("kind", KINDS)
def test_narrow_dtypes_and_autocast_stay_near(kind, way):
    options = {**KINDS[kind], "k": 16}  # all: none is chosen otherwise
    exact, states = build(**options), torch.randn(2, 3, 16, dtype=torch.float64)
    expected = exact(states)
    expected.square().sum().backward()
    dtype = torch.bfloat16 if way == "bfloat16" else torch.float32
    narrow = build(**options, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=way == "autocast"):
        actual = narrow(states.to(dtype))
    assert actual.dtype == (torch.float32 if way == "float32" else torch.bfloat16)
    actual.float().square().sum().backward()
    limit = 1e-5 if way == "float32" else 0.06
    assert (actual.double() - expected).norm() / expected.norm() < limit
    for (name, parameter), wide in zip(narrow.named_parameters(), exact.parameters(), strict=True):
        assert parameter.grad.dtype == dtype, name
        assert (parameter.grad.double() - wide.grad).norm() / wide.grad.norm() < limit, name


def test_initial_scores_have_deviation_one_if_all_are_chosen():
    options = UltraMemV2Options(n=4, k=16, value_width=64, pre_value_width=64, zero="none")
    memory = build_memory(options, ModelSizes(hidden_size=128, num_heads=4, intermediate_size=256, num_layers=8))
    with torch.no_grad():
        weights, _ = memory.retrieve(torch.randn(1, 512, 128))
    assert best_scores(options.keys, options.rank, options.side, options.k).mean < 0.5
    assert weights.std().item() == pytest.approx(1, rel=0.3)

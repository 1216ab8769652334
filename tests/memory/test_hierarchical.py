"""Memories that texts fetch against the paper's equations, row by row and level by level."""

import math

import pytest
import torch
from memory.hierarchical_memories import (
    GEGLU,
    LAYERS,
    SIZES,
    TYPES,
    WIDTHS,
    fetch,
    memory_of,
    options_of,
    states,
)

from midus_hf.ops import op_choices

PROJECTIONS = [(kind, role) for kind, roles in WIDTHS.items() for role in roles]


def blocks_of_row(fetched, layer, row):
    """The tensors of each level that a row has, by name."""
    for level in fetched.blocks_for(layer).levels:
        block = level.blocks[row].item()
        yield {name: tensor[block] for name, tensor in level.tensors.items()}


def silu(x):
    return x / (1 + (-x).exp())


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def wider_ffn(read, fetched, layer, activation, native):
    """What a gated network gives whose three matrices are concatenated with the blocks of all levels (figure 18)."""
    rows = []
    for row, tokens in enumerate(read):
        result = list(blocks_of_row(fetched, layer, row))
        gate = torch.cat([native[0], *(block["gate"] for block in result)])
        up = torch.cat([native[1], *(block["up"] for block in result)])
        down = torch.cat([native[2], *(block["down"] for block in result)], dim=1)
        rows.append(torch.stack([down @ (activation(gate @ token) * (up @ token)) for token in tokens]))
    return torch.stack(rows)


def patched(read, fetched, layer, weight, role, alpha):
    """What a projection gives that is patched to `W + alpha * sum of B A` (appendix I)."""
    rows = []
    for row, tokens in enumerate(read):
        matrix = weight
        for block in blocks_of_row(fetched, layer, row):
            matrix = matrix + alpha * block[f"{role}_up"] @ block[f"{role}_down"]
        rows.append(torch.stack([matrix @ token for token in tokens]))
    return torch.stack(rows)


def attended(query, fetched, layer, scaling):
    """What each query head reads of the keys and values of its group, `[B, T, H, d]` (figure 17)."""
    heads, rows = query.shape[1], []
    for row in range(len(query)):
        result = list(blocks_of_row(fetched, layer, row))
        keys = torch.cat([block["memory_keys"] for block in result])  # [R, K, d]
        values = torch.cat([block["memory_values"] for block in result])
        of_heads = []
        for head in range(heads):
            group = head // (heads // keys.shape[1])
            of_tokens = []
            for token in query[row, head]:
                weights = torch.stack([(token @ key) * scaling for key in keys[:, group]]).exp()
                of_tokens.append((weights / weights.sum()) @ values[:, group])
            of_heads.append(torch.stack(of_tokens))
        rows.append(torch.stack(of_heads, dim=1))
    return torch.stack(rows)


def expect_equal(actual, expected, leaves):
    """Two tensors and their gradients with respect to leaves, by one random cotangent."""
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    cotangent = states(*actual.shape, seed=11).detach()
    pairs = [torch.autograd.grad(output, leaves, cotangent) for output in (actual, expected)]
    for of_found, of_expected in zip(*pairs, strict=True):
        assert of_expected.any()
        torch.testing.assert_close(of_found, of_expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("backend", ["reference", "torch", "auto"])
@pytest.mark.parametrize(("sizes", "activation"), [(SIZES, silu), (GEGLU, gelu)], ids=["swiglu", "geglu"])
@pytest.mark.parametrize("layer", LAYERS)
def test_hidden_units_widen_the_network(layer, sizes, activation, backend):
    fetched, read = fetch("hier-ffn", sizes=sizes), states(5, 3, 12)
    native = [states(*shape, seed=seed).detach() for seed, shape in enumerate([(10, 12), (10, 12), (12, 10)])]
    alone = torch.stack([activation(token @ native[0].T) * (token @ native[1].T) for token in read]) @ native[2].T
    with op_choices(backend=backend):
        result = alone + memory_of("hier-ffn", sizes)(read, fetched=fetched.blocks_for(layer))
    expect_equal(result, wider_ffn(read, fetched, layer, activation, native), [read, *fetched.records.values()])


@pytest.mark.parametrize("backend", ["reference", "torch", "auto"])
@pytest.mark.parametrize("alpha", [2.0, 0.5])
@pytest.mark.parametrize(("kind", "role"), PROJECTIONS, ids=lambda value: value)
def test_low_rank_factors_patch_projections(kind, role, alpha, backend):
    (inputs, outputs), fetched = WIDTHS[kind][role], fetch(kind)
    read, weight = states(5, 3, inputs), states(outputs, inputs, seed=1)
    with op_choices(backend=backend):
        result = memory_of(kind, alpha=alpha)(read, read @ weight.T, projection=role, fetched=fetched.blocks_for(3))
    expect_equal(result, patched(read, fetched, 3, weight, role, alpha), [read, weight, *fetched.records.values()])


def test_alpha_is_two_and_each_projection_has_factors_of_its_own():
    for kind, roles in WIDTHS.items():
        assert TYPES[kind]().alpha == 2.0
        assert set(type(memory_of(kind)).projections) == set(roles)
        for level, size in enumerate(options_of(kind).sizes):
            result = {name: t.shape for name, t in options_of(kind).fetched(SIZES).levels[level].items()}
            down = {f"{role}_down": (size, inputs) for role, (inputs, _) in roles.items()}
            up = {f"{role}_up": (outputs, size) for role, (_, outputs) in roles.items()}
            assert result == ({**down, **up} if size else {})


@pytest.mark.parametrize("scaling", [0.5, 0.1])
@pytest.mark.parametrize("layer", LAYERS)
def test_heads_attend_to_all_fetched_keys_in_one_softmax(layer, scaling):
    """Every query, without a mask, by the model's scaling; what is read is added to what the heads give."""
    fetched, query, output = fetch("hier-kv"), states(5, 6, 3, 4), states(5, 3, 6, 4, seed=2)
    arguments = [torch.full((5, heads, 3, 4), torch.nan, dtype=torch.float64) for heads in (6, 2, 2)]
    actual = memory_of("hier-kv")(
        *arguments, output, unrotated=query, scaling=scaling, fetched=fetched.blocks_for(layer)
    )
    expected = output + attended(query, fetched, layer, scaling)
    expect_equal(actual, expected, [query, output, *fetched.records.values()])


def act(kind, fetched, read, layer=1):
    """What a memory of any kind makes of `[B, T, 24]`."""
    memory = memory_of(kind).to(read.dtype)
    if kind == "hier-ffn":
        return memory(read[..., :12], fetched=fetched.blocks_for(layer))
    if kind == "hier-kv":
        query = read.view(*read.shape[:2], 6, 4).transpose(1, 2)
        return memory(
            None,
            None,
            None,
            read.view(*read.shape[:2], 6, 4),
            unrotated=query,
            scaling=0.5,
            fetched=fetched.blocks_for(layer),
        )
    parts = [
        memory(
            read[..., :inputs],
            read[..., :1].expand(-1, -1, outputs),
            projection=role,
            fetched=fetched.blocks_for(layer),
        )
        for role, (inputs, outputs) in WIDTHS[kind].items()
    ]
    return torch.cat(parts, dim=-1)


@pytest.mark.parametrize("kind", TYPES)
def test_narrow_dtypes_stay_near_and_keep_their_dtype(kind):
    exact = act(kind, fetch(kind), states(5, 3, 24))
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        actual = act(kind, fetch(kind, dtype=dtype), states(5, 3, 24, dtype=dtype))
        assert actual.dtype == dtype
        assert (actual.double() - exact).norm() / exact.norm() < limit


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_as_they_start_add_exactly_zero(kind):
    fetched, read = fetch(kind), states(5, 3, 24).detach()
    for level, places in fetched.layout.records.items():
        for position in places:
            part = fetched.records[level].data[:, position.start : position.start + position.numel]
            position.tensor.initial.fill(part, torch.Generator().manual_seed(position.start))
            assert part.any() != (position.tensor.role == "value")
    added = act(kind, fetched, read)
    if kind == "hier-ffn":
        expected = torch.zeros(5, 3, 12, dtype=torch.float64)
    elif kind == "hier-kv":
        expected = read.view(5, 3, 6, 4)
    else:
        expected = read[..., :1].expand(-1, -1, added.shape[-1])
    assert torch.equal(added, expected)


@pytest.mark.parametrize("kind", TYPES)
def test_a_block_that_starts_at_zero_has_a_gradient(kind):
    """The other factor is not zero, so training moves it."""
    fetched = fetch(kind)
    for level, places in fetched.layout.records.items():
        for position in places:
            if position.tensor.role == "value":
                fetched.records[level].data[:, position.start : position.start + position.numel] = 0
    act(kind, fetched, states(5, 3, 24)).sum().backward()
    assert all(record.grad.abs().amax(1).gt(0).all() for record in fetched.records.values())


def test_what_is_on_the_device_stays_as_it_is():
    fetched = fetch("hier-kv")
    assert fetched.to("cpu") is fetched
    moved = fetched.to("meta")
    assert all(
        tensor.is_meta for level in moved.blocks_for(1).levels for tensor in (*level.tensors.values(), level.blocks)
    )

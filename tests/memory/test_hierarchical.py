"""Memories that texts fetch against the paper's equations, row by row and level by level; their sizes, and what is refused."""

import dataclasses
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from midus_hf.config.declared_tensors import ModelSizes
from midus_hf.memories.hierarchical.bank import FetchedBatch
from midus_hf.memories.hierarchical.options import BankLayout, block_layouts
from midus_hf.memories.module import build_memory
from midus_hf.memories.registry import MEMORY_TYPES, read_memories
from midus_hf.ops import op_choices
from midus_hf.ops.block_linear import block_linear

SIZES = ModelSizes(hidden_size=12, num_heads=6, head_dim=4, num_key_value_heads=2, intermediate_size=10, num_layers=4)
GEGLU = dataclasses.replace(SIZES, activation="gelu_pytorch_tanh")
LAYERS = (1, 3)
TYPES = {kind: options for kind, options in MEMORY_TYPES.items() if kind.startswith("hier-")}
WIDTHS = {
    "hier-lora-qk": {"query": (12, 24), "key": (12, 8)},
    "hier-lora-vo": {"value": (12, 8), "output_projection": (24, 12)},
    "hier-lora-ffn": {"gate": (12, 10), "up": (12, 10), "down": (10, 12)},
}
# Which of the blocks that there are each of five rows has; level 3 has none, and on level 4 all have one.
BLOCKS = {1: [0, 1, 0, 2, 1], 2: [3, 0, 0, 1, 2], 4: [0, 0, 0, 0, 0]}


def options_of(kind, **changes):
    return TYPES[kind](**{"sizes": [3, 1, 0, 2], "branching": 4, **changes})


def layout_of(options, sizes=SIZES, layers=LAYERS):
    return BankLayout(options.type, layers, options.fetched(sizes))


def fetch(kind, blocks=None, dtype=torch.float64, sizes=SIZES, **changes):
    """Random blocks that want gradients, and which row has which."""
    layout = layout_of(options_of(kind, **changes), sizes)
    generator = torch.Generator().manual_seed(4)
    blocks = {level: torch.tensor(of_row) for level, of_row in (blocks or BLOCKS).items()}

    def drawn(level):
        shape = max(blocks[level].tolist()) + 1, layout.record_numel(level)
        return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()

    return FetchedBatch(layout, {level: drawn(level) for level in layout.levels}, blocks)


def memory_of(kind, sizes=SIZES, **changes):
    return build_memory(options_of(kind, **changes), sizes).double()


def states(*shape, seed=9, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()


PROJECTIONS = [(kind, role) for kind, roles in WIDTHS.items() for role in roles]


def blocks_of_row(fetched, layer, row):
    for level in fetched.blocks_for(layer):
        block = level.blocks[row].item()
        yield {name: tensor[block] for name, tensor in level.tensors.items()}


def wider_ffn(read, fetched, layer, activation, native):
    """What a gated network gives whose three matrices are concatenated with the blocks of all levels (figure 18)."""
    rows = []
    for row, tokens in enumerate(read):
        blocks = list(blocks_of_row(fetched, layer, row))
        gate = torch.cat([native[0], *(block["gate"] for block in blocks)])
        up = torch.cat([native[1], *(block["up"] for block in blocks)])
        down = torch.cat([native[2], *(block["down"] for block in blocks)], dim=1)
        rows.append((activation(tokens @ gate.T) * (tokens @ up.T)) @ down.T)
    return torch.stack(rows)


def patched(read, fetched, layer, weight, role, alpha):
    """What a projection gives that is patched to `W + alpha * sum of B A` (appendix I)."""
    rows = []
    for row, tokens in enumerate(read):
        matrix = weight
        for block in blocks_of_row(fetched, layer, row):
            matrix = matrix + alpha * block[f"{role}_up"] @ block[f"{role}_down"]
        rows.append(tokens @ matrix.T)
    return torch.stack(rows)


def attended(query, fetched, layer, scaling):
    """What each query head reads of the keys and values of its group, `[B, T, H, d]` (figure 17)."""
    rows = []
    for row, heads in enumerate(query):
        blocks = list(blocks_of_row(fetched, layer, row))
        keys, values = (torch.cat([block[f"memory_{name}"] for block in blocks]) for name in ("keys", "values"))
        of_tokens = []
        for head, tokens in enumerate(heads):
            group = head // (len(heads) // keys.shape[1])
            weights = (tokens @ keys[:, group].T * scaling).exp()  # [T, R]
            of_tokens.append(weights / weights.sum(-1, keepdim=True) @ values[:, group])
        rows.append(torch.stack(of_tokens, dim=1))
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
@pytest.mark.parametrize(
    ("sizes", "activation"), [(SIZES, F.silu), (GEGLU, partial(F.gelu, approximate="tanh"))], ids=["swiglu", "geglu"]
)
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


@pytest.mark.parametrize("scaling", [0.5, 0.1])
@pytest.mark.parametrize("layer", LAYERS)
def test_heads_attend_to_all_fetched_keys_in_one_softmax(layer, scaling):
    """Every query, without a mask, by the model's scaling; what is read is added to what the heads give."""
    fetched, query, output = fetch("hier-kv"), states(5, 6, 3, 4), states(5, 3, 6, 4, seed=2)
    arguments = [torch.full((5, heads, 3, 4), torch.nan, dtype=torch.float64) for heads in (6, 2, 2)]
    given = {"unrotated": query, "scaling": scaling, "fetched": fetched.blocks_for(layer)}
    actual = memory_of("hier-kv")(*arguments, output, **given)
    expected = output + attended(query, fetched, layer, scaling)
    expect_equal(actual, expected, [query, output, *fetched.records.values()])


def act(kind, fetched, read):
    """What a memory of any kind makes of `[5, 3, 24]`."""
    memory, blocks, heads = memory_of(kind).to(read.dtype), fetched.blocks_for(1), read.view(5, 3, 6, 4)
    if kind == "hier-ffn":
        return memory(read[..., :12], fetched=blocks)
    if kind == "hier-kv":
        return memory(None, None, None, heads, unrotated=heads.transpose(1, 2), scaling=0.5, fetched=blocks)
    given, sides = {"fetched": blocks}, WIDTHS[kind].items()
    parts = [memory(read[..., :i], read[..., :o], projection=role, **given) for role, (i, o) in sides]
    return torch.cat(parts, dim=-1)


@pytest.mark.parametrize("kind", TYPES)
def test_narrow_dtypes_stay_near_and_keep_their_dtype(kind):
    exact = act(kind, fetch(kind), states(5, 3, 24))
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        actual = act(kind, fetch(kind, dtype=dtype), states(5, 3, 24, dtype=dtype))
        assert actual.dtype == dtype
        assert (actual.double() - exact).norm() / exact.norm() < limit


def test_fetched_batch_on_its_device_is_not_copied():
    fetched = fetch("hier-kv")
    assert fetched.to("cpu") is fetched
    for level in fetched.to("meta").blocks_for(1):
        assert all(tensor.is_meta for tensor in (*level.tensors.values(), level.blocks))


LORA_OF_ATTENTION = 2 * (24 + 30)
OF_MODEL = {"hier-lora-qk": LORA_OF_ATTENTION, "hier-lora-vo": LORA_OF_ATTENTION, "hier-lora-ffn": 3 * (24 + 40)}
OF_MODEL |= {"hier-kv": 2 * 30, "hier-ffn": 3 * 24}


@pytest.mark.parametrize("kind", OF_MODEL)
def test_block_sizes_are_those_of_appendix_i(kind):
    """For a model with as many key and value heads as query heads, which the paper's own are."""
    model = ModelSizes(hidden_size=24, num_heads=5, head_dim=6, intermediate_size=40, num_layers=7)
    layout = layout_of(TYPES[kind](sizes=[11, 7, 0, 2]), model, tuple(range(7)))
    constant = 7 * OF_MODEL[kind]
    assert layout.levels == [1, 2, 4]
    assert [layout.record_numel(level) for level in layout.levels] == [11 * constant, 7 * constant, 2 * constant]
    assert layout.fetched == 20 * constant
    assert layout.bank == (11 * 16 + 7 * 16**2 + 2 * 16**4) * constant
    assert [layout.num_records(level) for level in layout.levels] == [17, 257, 65537]


@pytest.mark.parametrize("kind", TYPES)
def test_fetching_memory_has_no_tensors(kind):
    options = TYPES[kind]()
    assert getattr(options, "alpha", 2.0) == 2.0
    assert (options.sizes, options.branching, options.without_ids) == ([256, 64, 16, 0], 16, "none")
    assert options.tensors(SIZES) == {}
    assert options.tables(SIZES, LAYERS) == ()
    memory = build_memory(options, SIZES)
    assert not list(memory.parameters())
    assert not list(memory.buffers())


def test_memories_of_one_tree_have_separate_banks():
    entry = {"type": "hier-ffn", "layers": [0, 2], "sizes": [2, 1], "branching": 3}
    others = {**entry, "type": "hier-kv", "layers": [1]}, {**entry, "name": "second"}
    layouts = block_layouts(read_memories([entry, *others], SIZES))
    assert list(layouts) == ["hier-ffn", "hier-kv", "second"]
    assert (layouts["hier-kv"].layers, layouts["second"].memory_type) == ((1,), "hier-ffn")


@pytest.mark.parametrize("backend", ["reference", "torch", "auto"])
@pytest.mark.parametrize("rows, num_blocks", [(5, 3), (5, 1), (2, 4), (4, 4), (0, 2)], ids=str)
def test_block_linear_multiplies_each_row_by_its_block(rows, num_blocks, backend):
    inputs, weights = states(rows, 3, 4), states(num_blocks, 6, 4, dtype=torch.float32)
    blocks = torch.randint(num_blocks, (rows,), generator=torch.Generator().manual_seed(0))
    result = block_linear(inputs, weights, blocks, backend=backend)
    assert result.shape == (rows, 3, 6)
    for row, block in enumerate(blocks.tolist()):
        torch.testing.assert_close(result[row], inputs[row] @ weights[block].double().T)

"""Memories that texts fetch against the paper's equations, row by row and level by level; how many parameters they have."""

import math

import pytest
import torch

from midus_config.fetched_blocks import BankLayout
from midus_config.memories.hierarchical import (
    HierFFNOptions,
    HierKVOptions,
    HierLoraFFNOptions,
    HierLoraQKOptions,
    HierLoraVOOptions,
)
from midus_config.memory_entries import read_memories
from midus_config.memory_types import MEMORY_TYPES
from midus_config.model_sizes import ModelSizes
from midus_hf.memory import build_memory
from midus_hf.memory.fetched import FetchedBatch

SIZES = ModelSizes(hidden_size=12, num_heads=6, head_dim=4, num_key_value_heads=2, intermediate_size=10, num_layers=4)
GEGLU = ModelSizes(
    hidden_size=12,
    num_heads=6,
    head_dim=4,
    num_key_value_heads=2,
    intermediate_size=10,
    num_layers=4,
    activation="gelu_pytorch_tanh",
)
LAYERS = (1, 3)
TYPES = {
    "hier-ffn": HierFFNOptions,
    "hier-lora-qk": HierLoraQKOptions,
    "hier-lora-vo": HierLoraVOOptions,
    "hier-lora-ffn": HierLoraFFNOptions,
    "hier-kv": HierKVOptions,
}
WIDTHS = {
    "hier-lora-qk": {"query": (12, 24), "key": (12, 8)},
    "hier-lora-vo": {"value": (12, 8), "output_projection": (24, 12)},
    "hier-lora-ffn": {"gate": (12, 10), "up": (12, 10), "down": (10, 12)},
}
BLOCKS = {1: [0, 1, 0, 2, 1], 2: [3, 0, 0, 1, 2], 4: [0, 0, 0, 0, 0]}
"""Which of the blocks that there are each of five rows has; level 3 has none, and on level 4 all have one."""

PROJECTIONS = [(kind, role) for kind, roles in WIDTHS.items() for role in roles]


def options_of(kind, **changes):
    return TYPES[kind](**{"sizes": [3, 1, 0, 2], "branching": 4, **changes})


def layout_of(options, sizes=SIZES, layers=LAYERS):
    return BankLayout(options.type, layers, options.fetched(sizes))


def fetch(kind, blocks=None, dtype=torch.float64, sizes=SIZES, **changes):
    """Random blocks that want gradients, and which row has which."""
    layout = layout_of(options_of(kind, **changes), sizes)
    generator = torch.Generator().manual_seed(4)
    blocks = {level: torch.tensor(of_row) for level, of_row in (blocks or BLOCKS).items()}
    records = {
        level: torch.randn(
            max(blocks[level].tolist()) + 1, layout.record_numel(level), dtype=torch.float64, generator=generator
        )
        .to(dtype)
        .requires_grad_()
        for level in layout.levels
    }
    return FetchedBatch(layout, records, blocks)


def memory_of(kind, sizes=SIZES, **changes):
    return build_memory(options_of(kind, **changes), sizes).double()


def states(*shape, seed=9, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()


def blocks_of_row(fetched, layer, row):
    """The tensors of each level that a row has, by name."""
    for level in fetched.of(layer).levels:
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
        found = list(blocks_of_row(fetched, layer, row))
        gate = torch.cat([native[0], *(block["gate"] for block in found)])
        up = torch.cat([native[1], *(block["up"] for block in found)])
        down = torch.cat([native[2], *(block["down"] for block in found)], dim=1)
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
        found = list(blocks_of_row(fetched, layer, row))
        keys = torch.cat([block["memory_keys"] for block in found])  # [R, K, d]
        values = torch.cat([block["memory_values"] for block in found])
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


def expect_equal(found, expected, leaves):
    """Two tensors and their gradients with respect to leaves, by one random cotangent."""
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    cotangent = states(*found.shape, seed=11).detach()
    pairs = [torch.autograd.grad(output, leaves, cotangent) for output in (found, expected)]
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
    found = alone + memory_of("hier-ffn", sizes)(read, fetched=fetched.of(layer), backend=backend)
    expect_equal(found, wider_ffn(read, fetched, layer, activation, native), [read, *fetched.records.values()])


@pytest.mark.parametrize("backend", ["reference", "torch", "auto"])
@pytest.mark.parametrize("alpha", [2.0, 0.5])
@pytest.mark.parametrize(("kind", "role"), PROJECTIONS, ids=lambda value: value)
def test_low_rank_factors_patch_projections(kind, role, alpha, backend):
    (inputs, outputs), fetched = WIDTHS[kind][role], fetch(kind)
    read, weight = states(5, 3, inputs), states(outputs, inputs, seed=1)
    found = memory_of(kind, alpha=alpha)(
        read, read @ weight.T, projection=role, fetched=fetched.of(3), backend=backend
    )
    expect_equal(found, patched(read, fetched, 3, weight, role, alpha), [read, weight, *fetched.records.values()])


def test_alpha_is_two_and_each_projection_has_factors_of_its_own():
    for kind, roles in WIDTHS.items():
        assert TYPES[kind]().alpha == 2.0
        assert set(type(memory_of(kind)).projections) == set(roles)
        for level, size in enumerate(options_of(kind).sizes):
            found = {name: t.shape for name, t in options_of(kind).fetched(SIZES).levels[level].items()}
            down = {f"{role}_down": (size, inputs) for role, (inputs, _) in roles.items()}
            up = {f"{role}_up": (outputs, size) for role, (_, outputs) in roles.items()}
            assert found == ({**down, **up} if size else {})


@pytest.mark.parametrize("scaling", [0.5, 0.1])
@pytest.mark.parametrize("layer", LAYERS)
def test_heads_attend_to_all_fetched_keys_in_one_softmax(layer, scaling):
    """Every query, without a mask, by the model's scaling; what is read is added to what the heads give."""
    fetched, query, output = fetch("hier-kv"), states(5, 6, 3, 4), states(5, 3, 6, 4, seed=2)
    arguments = [torch.full((5, heads, 3, 4), torch.nan, dtype=torch.float64) for heads in (6, 2, 2)]
    found = memory_of("hier-kv")(*arguments, output, unrotated=query, scaling=scaling, fetched=fetched.of(layer))
    expected = output + attended(query, fetched, layer, scaling)
    expect_equal(found, expected, [query, output, *fetched.records.values()])


def act(kind, fetched, read, layer=1):
    """What a memory of any kind makes of `[B, T, 24]`."""
    memory = memory_of(kind).to(read.dtype)
    if kind == "hier-ffn":
        return memory(read[..., :12], fetched=fetched.of(layer))
    if kind == "hier-kv":
        query = read.view(*read.shape[:2], 6, 4).transpose(1, 2)
        return memory(
            None, None, None, read.view(*read.shape[:2], 6, 4), unrotated=query, scaling=0.5, fetched=fetched.of(layer)
        )
    parts = [
        memory(read[..., :inputs], read[..., :1].expand(-1, -1, outputs), projection=role, fetched=fetched.of(layer))
        for role, (inputs, outputs) in WIDTHS[kind].items()
    ]
    return torch.cat(parts, dim=-1)


@pytest.mark.parametrize("kind", TYPES)
def test_rows_of_a_batch_get_what_they_get_alone(kind):
    fetched, read = fetch(kind), states(5, 3, 24)
    together = act(kind, fetched, read)
    for row in range(5):
        blocks = {level: found[row : row + 1] for level, found in fetched.blocks.items()}
        alone = act(kind, FetchedBatch(fetched.layout, fetched.records, blocks), read[row : row + 1])
        torch.testing.assert_close(alone[0], together[row], rtol=1e-11, atol=1e-12)


PATHS = {
    "one path": {1: [1] * 5, 2: [0] * 5, 4: [2] * 5},
    "some": {1: [1, 0, 1, 1, 0], 2: [0, 0, 0, 1, 0], 4: [2, 1, 2, 2, 1]},
    "each its own": {1: [0, 0, 1, 1, 0], 2: [0, 1, 1, 2, 3], 4: [0, 1, 2, 3, 4]},
}


@pytest.mark.parametrize("blocks", PATHS.values(), ids=list(PATHS))
@pytest.mark.parametrize("kind", TYPES)
def test_joined_levels_give_what_they_give_one_by_one(kind, blocks):
    fetched, read = fetch(kind, blocks), states(5, 3, 24)
    records = {level: record.detach() for level, record in fetched.records.items()}
    apart = FetchedBatch(fetched.layout, records, fetched.blocks)
    joined = apart.joined()
    assert joined.joined() is joined is apart.joined() and joined.num_rows == 5
    (level,) = joined.of(LAYERS[0]).levels
    paths = len(set(zip(*blocks.values(), strict=True)))
    assert {len(tensor) for tensor in level.tensors.values()} == {paths}
    assert (level.blocks is None) == (paths == 5)
    torch.testing.assert_close(act(kind, joined, read), act(kind, apart, read), rtol=1e-11, atol=1e-12)


def test_levels_are_not_joined_that_have_no_room_or_want_gradients():
    fetched = fetch("hier-ffn")
    assert fetched.joined() is fetched
    records = {level: record.detach() for level, record in fetched.records.items()}
    size = 5 * 8 * fetched.layout.fetched  # the five rows have as many paths
    for most, joins in ((size - 1, False), (size, True)):
        apart = FetchedBatch(fetched.layout, records, fetched.blocks)
        assert (apart.joined(most) is not apart) == joins


@pytest.mark.parametrize("kind", TYPES)
def test_one_block_for_all_rows_equals_a_copy_for_each(kind):
    """Its gradient is the sum of those of the copies."""
    shared, read = fetch(kind, {1: [0] * 5, 2: [0] * 5, 4: [0] * 5}), states(5, 3, 24)
    copies = {level: record.detach().repeat(5, 1).requires_grad_() for level, record in shared.records.items()}
    separate = FetchedBatch(shared.layout, copies, {level: torch.arange(5) for level in copies})
    outputs = [act(kind, fetched, read) for fetched in (shared, separate)]
    torch.testing.assert_close(*outputs, rtol=1e-11, atol=1e-12)
    cotangent = states(*outputs[0].shape, seed=3).detach()
    of_shared = torch.autograd.grad(outputs[0], list(shared.records.values()), cotangent)
    of_copies = torch.autograd.grad(outputs[1], list(copies.values()), cotangent)
    for one, many in zip(of_shared, of_copies, strict=True):
        # Of the record of two layers the other layer's half has no gradient.
        assert many.any() and torch.allclose(one[0], many.sum(0), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", TYPES)
def test_layers_read_their_own_part_of_a_record(kind):
    fetched, read = fetch(kind), states(5, 3, 24)
    halves = {}
    for layer in LAYERS:
        gradients = torch.autograd.grad(act(kind, fetched, read, layer).sum(), list(fetched.records.values()))
        halves[layer] = [gradient.abs().sum(0) > 0 for gradient in gradients]
    for first, last in zip(*halves.values(), strict=True):
        middle = len(first) // 2
        assert first[:middle].any() and not first[middle:].any()
        assert last[middle:].any() and not last[:middle].any()


@pytest.mark.parametrize("kind", TYPES)
def test_narrow_dtypes_stay_near_and_keep_their_dtype(kind):
    exact = act(kind, fetch(kind), states(5, 3, 24))
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        found = act(kind, fetch(kind, dtype=dtype), states(5, 3, 24, dtype=dtype))
        assert found.dtype == dtype
        assert (found.double() - exact).norm() / exact.norm() < limit


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_as_they_start_add_exactly_zero(kind):
    fetched, read = fetch(kind), states(5, 3, 24).detach()
    for level, places in fetched.layout.records.items():
        for place in places:
            part = fetched.records[level].data[:, place.start : place.start + place.numel]
            place.tensor.initial.fill(part, torch.Generator().manual_seed(place.start))
            assert part.any() != (place.tensor.role == "value")
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
        for place in places:
            if place.tensor.role == "value":
                fetched.records[level].data[:, place.start : place.start + place.numel] = 0
    act(kind, fetched, states(5, 3, 24)).sum().backward()
    assert all(record.grad.abs().amax(1).gt(0).all() for record in fetched.records.values())


def test_what_is_on_the_device_stays_as_it_is():
    fetched = fetch("hier-kv")
    assert fetched.to("cpu") is fetched
    moved = fetched.to("meta")
    assert all(tensor.is_meta for level in moved.of(1).levels for tensor in (*level.tensors.values(), level.blocks))


MHA = {"hidden_size": 24, "num_heads": 5, "head_dim": 6, "intermediate_size": 40, "num_layers": 7}


@pytest.mark.parametrize(
    ("kind", "of_model"),
    [
        ("hier-lora-qk", lambda d, df, h, dh: 2 * (d + h * dh)),
        ("hier-lora-vo", lambda d, df, h, dh: 2 * (d + h * dh)),
        ("hier-lora-ffn", lambda d, df, h, dh: 3 * (d + df)),
        ("hier-kv", lambda d, df, h, dh: 2 * h * dh),
        ("hier-ffn", lambda d, df, h, dh: 3 * d),
    ],
)
def test_sizes_are_those_of_appendix_i(kind, of_model):
    """For a model with as many key and value heads as query heads, which the paper's own are."""
    layout = layout_of(TYPES[kind](sizes=[11, 7, 0, 2]), ModelSizes(**MHA), tuple(range(7)))
    constant = 7 * of_model(24, 40, 5, 6)
    assert layout.levels == [1, 2, 4]
    assert [layout.record_numel(level) for level in layout.levels] == [11 * constant, 7 * constant, 2 * constant]
    assert layout.fetched == 20 * constant
    assert layout.bank == (11 * 16 + 7 * 16**2 + 2 * 16**4) * constant
    assert [layout.num_records(level) for level in layout.levels] == [17, 257, 65537]


def of_paper(sizes, hidden, layers):
    model = ModelSizes(hidden_size=hidden, num_heads=4, intermediate_size=4 * hidden, num_layers=layers)
    layout = layout_of(HierFFNOptions(sizes=sizes), model, tuple(range(layers)))
    return layout.fetched, layout.bank


@pytest.mark.parametrize(
    ("sizes", "hidden", "layers", "fetched", "bank"),
    [
        ([256, 64, 16, 0], 512, 35, 18.06e6, 4.62e9),  # OpenLM-160M, tables 1 and 7
        ([512, 128, 32, 0], 1024, 24, 49.5e6, 12.68e9),  # OpenLM-410M, table 1
        ([768, 256, 16, 0], 2048, 24, 153.4e6, 21.14e9),  # OpenLM-1B, table 1
        ([512, 128, 32, 0], 640, 18, 23.22e6, 5.945e9),  # Gemma 3 270M, table 2
        ([512, 128, 32, 0], 896, 24, 43.35e6, 11.10e9),  # Qwen 2.5 0.5B, table 2
        ([768, 256, 16, 0], 2048, 16, 102.2e6, 14.09e9),  # Llama 3.2 1B, table 2
        ([0, 16, 4, 1], 512, 35, 1.13e6, 4.62e9),  # table 7
        ([5376, 0, 0, 0], 512, 35, 289e6, 4.62e9),
        ([4096, 320, 17, 2], 512, 35, 238.4e6, 18.7e9),
    ],
)
def test_sizes_are_those_of_the_tables(sizes, hidden, layers, fetched, bank):
    assert of_paper(sizes, hidden, layers) == (pytest.approx(fetched, rel=2e-3), pytest.approx(bank, rel=5e-3))


@pytest.mark.parametrize(
    ("sizes", "layers", "fetched", "bank"),
    [
        ([3840, 336, 6, 0], 12, 154_165_248, 6_341_787_648),
        ([1445, 256, 8, 0], 17, 89_250_816, 6_341_246_976),
        ([870, 226, 9, 0], 19, 64_496_640, 6_341_099_520),
        ([384, 200, 10, 0], 21, 38_320_128, 6_341_787_648),
        ([264, 94, 16, 0], 22, 25_276_416, 6_341_001_216),
    ],
    ids=["260M", "320M", "350M", "370M", "385M"],
)
def test_sizes_are_exactly_those_of_table_8(sizes, layers, fetched, bank):
    assert of_paper(sizes, 1024, layers) == (fetched, bank)


def test_a_block_of_appendix_d_has_860160_parameters():
    model = ModelSizes(hidden_size=512, num_heads=12, head_dim=32, intermediate_size=2048, num_layers=35)
    layout = layout_of(HierFFNOptions(sizes=[0, 0, 16, 0]), model, tuple(range(35)))
    assert layout.levels == [3] and layout.fetched == layout.record_numel(3) == 860_160
    assert layout.bank == 4096 * 860_160 and layout.blocks.nodes(3) == 4096


@pytest.mark.parametrize("kind", TYPES)
def test_a_memory_has_no_tensors_of_its_own(kind):
    options = TYPES[kind]()
    assert options.sizes == [256, 64, 16, 0] and options.branching == 16 and options.without_ids == "none"
    assert options.tensors(SIZES) == {} and options.tables(SIZES, LAYERS) == ()
    assert not list(build_memory(options, SIZES).parameters()) and not list(build_memory(options, SIZES).buffers())


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("hier-ffn", {"branching": 1}, "branching is 1; expected 2 or more."),
        *(
            (
                "hier-kv",
                {"sizes": sizes},
                f"sizes is {sizes}; expected a size for each level of the tree, 0 or more, and not all of them 0, such as "
                "[256, 64, 16, 0].",
            )
            for sizes in ([], [0, 0], [4, -1])
        ),
        *(
            ("hier-lora-qk", {"alpha": alpha}, f"alpha is {alpha!r}; expected a number above 0.")
            for alpha in (0.0, -1.0, math.inf, math.nan)
        ),
    ],
    ids=str,
)
def test_options_that_make_no_memory_are_refused(kind, changes, message):
    with pytest.raises(ValueError) as raised:
        TYPES[kind](**changes)
    assert str(raised.value) == message


def entry(kind="hier-ffn", **changes):
    return {"type": kind, "layers": [0, 2], "sizes": [2, 1], "branching": 3, **changes}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([entry(site="behind-layer")], "memory of type 'hier-ffn' has site = 'behind-layer'; expected one of: beside-ffn."),
        ([entry("hier-kv", site="inserted")], "memory of type 'hier-kv' has site = 'inserted'; expected one of: inside-attention."),
        ([entry(alpha=1.0)], "alpha"),
        ([entry("hier-lora-vo", rank=4)], "rank"),
        ([entry(without_ids="all")], "without_ids"),
        ([entry(sizes=4)], "sizes"),
        ([entry(sizes=[1.5])], "sizes"),
        ([entry(branching=2.5)], "branching"),
        (
            [entry(), entry("hier-kv", branching=4)],
            "memory 'hier-kv' fetches blocks by a tree of branching 4 and 2 levels, and 'hier-ffn' by one of branching 3 and 2 "
            "levels; expected one tree, by whose nodes a text fetches from both.",
        ),
        (
            [entry(), entry("hier-kv", sizes=[2, 1, 0])],
            "memory 'hier-kv' fetches blocks by a tree of branching 3 and 3 levels, and 'hier-ffn' by one of branching 3 and 2 "
            "levels; expected one tree, by whose nodes a text fetches from both.",
        ),
        ([entry(), entry()], "two memories have the name 'hier-ffn'; expected a name of its own for each."),
    ],
)  # fmt: skip
def test_entries_that_do_not_fit_are_refused(entries, message):
    with pytest.raises(ValueError) as raised:
        read_memories(entries, SIZES)
    assert message in str(raised.value)


def test_memories_of_one_tree_have_a_bank_each():
    memories = read_memories([entry(), entry("hier-kv", layers=[1]), entry(name="second")], SIZES)
    assert list(memories.banks) == ["hier-ffn", "hier-kv", "second"]
    assert memories.banks["hier-kv"].layers == (1,) and memories.banks["second"].memory_type == "hier-ffn"


def test_these_are_all_the_types():
    assert set(TYPES) == {name for name in MEMORY_TYPES if name.startswith("hier-")}

"""What memories derive from their parameters is kept for one context or one `generate` call, and served nowhere else."""

import copy
import io
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import pytest
import torch
from memory.building import build
from memory.chapter_layers import layer as chapter_layer
from models.cases import CASES, CLOSE, GREEDY
from pairs import by_default, in_turn
from tiny import logits, prompt

from midus_hf.config.declared_tensors import ModelSizes
from midus_hf.memories.decode_cache import decode_cache
from midus_hf.memories.module import MemoryModule, build_memory
from midus_hf.memories.ultramem_v2.options import UltraMemV2Options


def headwise() -> Any:
    memory = build("midus-hml", hidden_size=32, num_heads=4, head_dim=8, n=8, k=3)
    with torch.no_grad():
        memory.value_bank.normal_()
    return memory


def ultramem(**options: Any) -> Any:
    sizes = {"n": 8, "k": 3, "key_width": 6, "value_width": 6, "pre_value_width": 2, "zero": "none"}
    return build_memory(UltraMemV2Options(**sizes, **options), ModelSizes(hidden_size=32, num_heads=4))


class Keeper(NamedTuple):
    """A memory with a cache, the width of its input, and the tensors that the cache is derived from."""

    make: Callable[[], Any]
    width: int
    sources: tuple[str, ...]
    is_exact: bool = False  # passes that read the cache have the same bits


KEYS = ("row_keys", "column_keys", "key_norm_weight", "core", "row_vector")
CHAPTERS = ("bank", "key_projection.weight", "value_projection.weight")
KEEPERS = {
    "midus-hml": Keeper(headwise, 32, ("value_bank", "value_transform")),
    "ultramem heads": Keeper(lambda: ultramem(heads=2, rank=3), 32, KEYS, is_exact=True),
    "chapters": Keeper(lambda: chapter_layer(routing="token").float(), 8, CHAPTERS),
}


@pytest.fixture(params=KEEPERS)
def keeper(request) -> Keeper:
    return KEEPERS[request.param]


@pytest.fixture
def memory(keeper) -> Any:
    torch.manual_seed(0)
    return keeper.make().eval()


@pytest.fixture
def inputs(keeper) -> torch.Tensor:
    return torch.randn(2, 5, keeper.width, generator=torch.Generator().manual_seed(1))


def without(run, inputs):
    with torch.no_grad():
        return run(inputs)


def within(memory, inputs, run=None):
    with torch.no_grad(), decode_cache(memory):
        return (memory if run is None else run)(inputs)


def assert_close(actual, expected, is_exact=False):
    tolerance = 0 if is_exact else 1e-5
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def is_cached(memory: Any) -> bool:
    return memory.decode_cache is not None and memory.decode_cache.is_open


def parts(kept: Any) -> tuple[torch.Tensor, ...]:
    return (kept,) if isinstance(kept, torch.Tensor) else kept


def test_cache_is_filled_once_and_passes_compute_the_same(keeper, memory, inputs):
    expected = without(memory, inputs)
    assert not is_cached(memory)
    with torch.no_grad(), decode_cache(memory):
        kept = memory.decode_cache.read(memory, inputs)
        outputs = [memory(inputs) for _ in range(2)]
        with decode_cache(torch.nn.Sequential(memory)):
            assert memory.decode_cache.read(memory, inputs) is kept
        assert memory.decode_cache.read(memory, inputs) is kept, "an inner context leaves an outer one what it keeps"
        parts(kept)[0].mul_(-2)
        assert not torch.allclose(memory(inputs), expected, atol=1e-3), "what is kept is read"
    assert not is_cached(memory)
    assert_close(outputs, [expected] * 2, keeper.is_exact)
    assert torch.equal(without(memory, inputs), expected)
    with pytest.raises(KeyError), decode_cache(memory):
        raise KeyError
    assert not is_cached(memory)
    with torch.inference_mode(), decode_cache(memory):
        assert_close(memory(inputs), expected, keeper.is_exact)
    memory(inputs).sum().backward()
    assert memory.get_parameter(keeper.sources[0]).grad.any()


def test_pass_with_gradients_does_not_read_the_cache(keeper, memory, inputs):
    expected = memory(inputs)
    with decode_cache(memory):
        output = memory(inputs)
        assert torch.equal(output, expected)
        output.sum().backward()
        assert memory.get_parameter(keeper.sources[0]).grad.any()
        if "row_vector" in keeper.sources:  # which training keeps, so that signs last
            memory.train().row_vector.zero_()
            without(memory, inputs)
            assert memory.row_vector.any()


def through_data(memory, name):
    """Write as swaps of averaged weights and merged adapters do, which leave the version counter as it is."""
    attrgetter(name)(memory).data.mul_(-2)


def another_tensor(memory, name):
    changed, (owner, _, leaf) = -2 * attrgetter(name)(memory).detach(), name.rpartition(".")
    setattr(memory.get_submodule(owner), leaf, changed if name == "row_vector" else torch.nn.Parameter(changed))


# In place and by another tensor: whatever writes into parameters does one or the other.
CHANGES = (through_data, another_tensor)


def assert_never_stale(memory, run, inputs, change) -> None:
    """Passes with and without what is kept, after `change`, are those of a copy that has never kept anything."""
    before, before_kept = without(run, inputs), within(memory, inputs, run)
    change()
    expected = without(copy.deepcopy(memory), inputs)
    assert not torch.allclose(expected, before, atol=1e-4), "the change changed nothing"
    assert_close(without(run, inputs), expected)
    assert_close(within(memory, inputs, run), expected)
    assert_close(run(inputs).detach(), expected)  # with gradients
    assert_close(before_kept, before)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize(
    ("keeper", "name"),
    [(keeper, name) for keeper in KEEPERS.values() for name in keeper.sources],
    ids=[f"{name}-{source}" for name, keeper in KEEPERS.items() for source in keeper.sources],
)
def test_no_pass_returns_results_of_older_weights(keeper, name, change, memory, inputs):
    if name == "row_vector":  # its sign alone counts: then others are chosen, with scores of their own
        with torch.no_grad():
            memory.core.add_(torch.eye(memory.core.shape[-1]))
    assert_never_stale(memory, memory, inputs, lambda: torch.no_grad()(change)(memory, name))


@pytest.mark.parametrize(("keeper", "change"), in_turn(("midus-hml", "ultramem heads"), CHANGES), indirect=["keeper"])
def test_no_compiled_pass_returns_results_of_older_weights(keeper, change, memory, inputs):
    torch._dynamo.reset()

    def changed():
        for name in set(keeper.sources) - {"row_vector", "value_transform"}:
            torch.no_grad()(change)(memory, name)

    assert_never_stale(memory, torch.compile(memory, backend="eager"), inputs, changed)


@pytest.mark.parametrize("keeper", by_default(("midus-hml", "ultramem heads", "chapters"), KEEPERS), indirect=True)
def test_one_graph_reads_the_caches_of_all_contexts(keeper, memory, inputs):
    torch._dynamo.reset()
    graphs = []

    def counting(graph, _):
        graphs.append(graph)
        return graph.forward

    run = torch.compile(memory, backend=counting, fullgraph=True)
    for _ in range(3):
        output = within(memory, inputs, run)
    assert len(graphs) == 1
    assert_close(output, without(memory, inputs), keeper.is_exact)
    with torch.no_grad(), decode_cache(memory):
        parts(memory.decode_cache.read(memory, inputs))[0].mul_(-2)
        assert not torch.allclose(run(inputs), output, atol=1e-3)
    assert_close(without(run, inputs), output)
    torch._dynamo.reset()


@pytest.mark.parametrize("way", ["bfloat16", "autocast"])
def test_narrow_passes_read_a_narrow_cache_or_the_same_bits(way, keeper, memory, inputs):
    """Keys of UltraMemV2 are normalised in float32 of what is stored, under autocast too."""
    of_pass = inputs.bfloat16()
    if way == "bfloat16":
        memory, inputs = memory.to(torch.bfloat16), of_pass
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=way == "autocast"), torch.no_grad():
        expected = memory(inputs)
        with decode_cache(memory):
            like = of_pass.float() if keeper.is_exact else of_pass
            kept = memory.decode_cache.read(memory, like)
            assert {tensor.dtype for tensor in parts(kept)} == {like.dtype}
            actual = memory(inputs)
    tolerance = 0 if keeper.is_exact else 3e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_cache_is_not_saved_copied_or_pickled(keeper, memory, inputs):
    names, source, file = set(memory.state_dict()), keeper.sources[0], io.BytesIO()
    with torch.no_grad(), decode_cache(memory):
        assert set(memory.state_dict()) == names
        torch.save(memory, file)
        file.seek(0)
        for other in (copy.deepcopy(memory), torch.load(file, weights_only=False)):
            assert not is_cached(other)
            assert_close(other(inputs), memory(inputs))
            other.get_parameter(source).mul_(-2)
            assert_close(within(other, inputs), without(other, inputs))
        assert is_cached(memory)


@pytest.mark.parametrize("left", [torch.empty(0), torch.empty(64, 8, device="meta")], ids=["sharded-away", "meta"])
def test_absent_parameters_are_not_cached(left):
    memory = headwise()
    memory.value_bank = torch.nn.Parameter(left)
    with decode_cache(memory):
        assert not is_cached(memory)


def test_other_parameter_or_dtype_does_not_read_the_cache(keeper, memory, inputs):
    source = keeper.sources[0]
    stand_in = {source: -2 * memory.get_parameter(source).detach()}
    with torch.no_grad(), decode_cache(memory):
        shifted = torch.func.functional_call(memory, stand_in, (inputs,))
        another_tensor(memory, source)
        assert_close(memory(inputs), shifted)
    assert_close(without(memory, inputs), shifted)
    with torch.no_grad(), decode_cache(memory):
        assert memory.decode_cache.read(memory, inputs.double()) is None
        memory.to(torch.bfloat16)
        expected = without(copy.deepcopy(memory), inputs.bfloat16())
        assert torch.equal(memory(inputs.bfloat16()), expected)


@pytest.mark.parametrize("case", ["midus-hml", "chunk", "ultramem own", "ultramem ring", "ultramem heads"])
def test_generate_caches_for_one_call_and_follows_weights(native_family, case, tmp_path):
    case, seen = CASES[case], []
    model = case.model(native_family, tmp_path)
    memories = [module for module in model.modules() if isinstance(module, MemoryModule)]
    for memory in memories:
        memory.register_forward_pre_hook(lambda module, _: seen.append(is_cached(module)))
    settings = {**GREEDY, "output_logits": True, "return_dict_in_generate": True}

    def check():
        actual = model.generate(prompt(7), **settings)
        assert len(memories) == 2
        assert seen == [True] * 8
        assert all(not is_cached(memory) for memory in memories)
        expected = logits(model, actual.sequences)[:, 6:-1]
        torch.testing.assert_close(torch.stack(actual.logits, 1).to(expected.dtype), expected, **CLOSE[case.dtype])
        assert seen[8:] == [False] * 2
        seen.clear()
        return actual.logits[0]

    before = check()
    for memory in memories:
        for parameter in memory.parameters():
            parameter.data.mul_(-3)
    assert not torch.allclose(check(), before, atol=1e-2)

"""Normalised keys and singular vectors of UltraMemV2 are kept for one context or one `generate` call, and served nowhere else."""

import copy

import pytest
import torch
from accelerate import cpu_offload
from memory.test_kept_values import OPTIMIZERS
from models.ultramem_models import ultramem_model
from tiny import prompt

from midus_hf.config.memories.ultramem import UltraMemOptions
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.memory import ultramem
from midus_hf.memory.kept_values import kept_values
from midus_hf.memory.registry import build_memory

KINDS = {"plain": {}, "heads-expanded": {"heads": 2, "key_pairs": 2, "rank": 3}}
KEPT_FROM = ("row_keys", "column_keys", "key_norm_weight", "core", "row_vector")


def acting_memory(kind: str = "heads-expanded") -> torch.nn.Module:
    """A memory that retrieves something, in eval mode."""
    torch.manual_seed(0)
    options = {"n": 8, "k": 3, "key_width": 6, "value_width": 6, "pre_value_width": 2, "zero": "none"}
    return build_memory(UltraMemOptions(**options, **KINDS[kind]), ModelSizes(hidden_size=32, num_heads=4)).eval()


@pytest.fixture
def memory() -> torch.nn.Module:
    return acting_memory()


@pytest.fixture
def inputs() -> torch.Tensor:
    return torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))


def without(memory, inputs):
    with torch.no_grad():
        return memory(inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_derived_once_per_context_and_give_the_same_bits(kind, inputs, monkeypatch):
    memory = acting_memory(kind)
    derived = []
    whole = ultramem._keys_and_vectors
    monkeypatch.setattr(
        ultramem, "_keys_and_vectors", lambda *given, **words: derived.append(1) or whole(*given, **words)
    )
    expected = without(memory, inputs)
    assert len(derived) == 1
    with torch.no_grad(), kept_values(memory):
        outputs = [memory(inputs) for _ in range(3)]
    assert len(derived) == 1  # by what `kept` holds, which is the function itself
    assert all(torch.equal(output, expected) for output in outputs)
    without(memory, inputs)
    assert len(derived) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast_they_give_the_same_bits_too(kind, inputs):
    memory = acting_memory(kind)
    with torch.autocast("cpu", torch.bfloat16):
        expected = without(memory, inputs)
        with torch.no_grad(), kept_values(memory):
            memory(inputs)
            assert {vectors.dtype for vectors in memory.kept._derived} == {torch.float32}
            assert torch.equal(memory(inputs), expected)


def test_what_is_read_is_what_was_kept(memory, inputs):
    """So that the other tests compare passes that differ."""
    with torch.no_grad(), kept_values(memory):
        before = memory(inputs)
        assert memory.kept.num_bytes > 2 * memory.row_keys.nbytes
        memory.kept._derived[0].neg_()
        assert not torch.allclose(memory(inputs), before)


def changes():
    """Ways to change a tensor, in place, behind the back of its version, or by another one."""

    def in_place(memory, name):
        getattr(memory, name).mul_(-2)

    def through_data(memory, name):
        getattr(memory, name).data.mul_(-2)

    def other_data(memory, name):
        getattr(memory, name).data = -2 * getattr(memory, name).data

    def a_loaded_state(memory, name):
        memory.load_state_dict(memory.state_dict() | {name: -2 * getattr(memory, name).detach()})

    def an_assigned_state(memory, name):
        memory.load_state_dict(memory.state_dict() | {name: -2 * getattr(memory, name).detach()}, assign=True)

    def another_tensor(memory, name):
        changed = -2 * getattr(memory, name).detach()
        setattr(memory, name, changed if name == "row_vector" else torch.nn.Parameter(changed))

    return (in_place, through_data, other_data, a_loaded_state, an_assigned_state, another_tensor)


def assert_never_stale(memory, run, inputs, change):
    """Passes with and without what is kept, after `change`, are those of a copy that has never kept anything."""
    before = without(run, inputs)
    with torch.no_grad(), kept_values(memory):
        run(inputs)
    change()
    expected = without(copy.deepcopy(memory), inputs)
    assert not torch.allclose(expected, before, atol=1e-4), "the change changed nothing"
    torch.testing.assert_close(without(run, inputs), expected)
    with torch.no_grad(), kept_values(memory):
        torch.testing.assert_close(run(inputs), expected)
    torch.testing.assert_close(run(inputs).detach(), expected)  # with gradients


@pytest.mark.parametrize("change", changes()[:3:2], ids=lambda change: change.__name__)
def test_no_compiled_pass_scores_by_older_weights(change, memory, inputs):
    def changed():
        with torch.no_grad():
            for name in KEPT_FROM[:-1]:
                change(memory, name)

    torch._dynamo.reset()
    assert_never_stale(memory, torch.compile(memory, backend="aot_eager"), inputs, changed)


@pytest.mark.parametrize("change", changes(), ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", KEPT_FROM)
def test_each_of_what_they_are_made_of_counts(name, change, memory, inputs):
    def changed():
        with torch.no_grad():
            change(memory, name)

    if name == "row_vector":  # its sign alone counts: then others are chosen, with scores of their own
        with torch.no_grad():
            memory.core.add_(torch.eye(memory.core.shape[-1]))
    assert_never_stale(memory, memory, inputs, changed)


@pytest.mark.parametrize(
    "name", ["AdamW one by one", "AdamW foreach", "AdamW fused", "SGD fused", "Adafactor of torch"]
)
def test_no_pass_scores_by_weights_from_before_an_optimizer_stepped(name, memory, inputs):
    optimizer = OPTIMIZERS[name](list(memory.parameters()))

    def step():
        memory(inputs).square().sum().backward()
        without(memory, inputs)
        optimizer.step()

    assert_never_stale(memory, memory, inputs, step)


def test_another_tensor_within_the_context_is_seen(memory, inputs):
    with torch.no_grad(), kept_values(memory):
        memory.row_keys = torch.nn.Parameter(memory.row_keys + 1)
        assert torch.equal(memory(inputs), without(copy.deepcopy(memory), inputs))
        stand_in = {"core": memory.core + torch.rand_like(memory.core)}
        shifted = torch.func.functional_call(memory, stand_in, (inputs,))
    memory.core = torch.nn.Parameter(stand_in["core"].detach())
    assert torch.equal(shifted, without(memory, inputs))


def test_a_cast_within_the_context_does_without(memory, inputs):
    with torch.no_grad(), kept_values(memory):
        memory.to(torch.bfloat16)
        expected = without(copy.deepcopy(memory), inputs.bfloat16())
        assert torch.equal(memory(inputs.bfloat16()), expected)


@pytest.mark.parametrize("way", ["bfloat16", "autocast"])
def test_narrow_passes_score_by_the_same_bits(way, memory, inputs):
    """Keys are normalised in float32, under autocast too, of what is stored."""
    if way == "bfloat16":
        memory, inputs = memory.to(torch.bfloat16), inputs.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=way == "autocast"), torch.no_grad():
        expected = memory(inputs)
        with kept_values(memory):
            assert memory.kept._derived[0].dtype == torch.float32
            assert torch.equal(memory(inputs), expected)


def test_training_and_gradients_do_without(memory, inputs):
    expected = memory(inputs)
    with kept_values(memory):
        output = memory(inputs)
        assert torch.equal(output, expected)
        output.sum().backward()
        assert memory.row_keys.grad.any()
        memory.train()
        memory.row_vector.zero_()
        without(memory, inputs)  # keeps the vectors, so that signs last
    assert memory.row_vector.any()


def test_they_are_neither_copied_nor_kept_where_parameters_come_and_go(memory, inputs):
    expected = without(memory, inputs)
    with torch.no_grad(), kept_values(memory):
        assert copy.deepcopy(memory).kept.is_empty and not memory.kept.is_empty
    offloaded = cpu_offload(copy.deepcopy(memory), execution_device=torch.device("cpu"))
    with torch.no_grad(), kept_values(offloaded):
        assert offloaded.kept.is_empty
        assert torch.equal(offloaded(inputs), expected)


def test_a_new_context_does_not_compile_again(memory, inputs):
    torch._dynamo.reset()
    graphs = []

    def counting(graph, _):
        graphs.append(graph)
        return graph.forward

    run = torch.compile(memory, backend=counting, fullgraph=True)
    for _ in range(3):
        with torch.no_grad(), kept_values(memory):
            output = run(inputs)
    assert len(graphs) == 1
    torch.testing.assert_close(output, without(memory, inputs))


@pytest.mark.parametrize("kind", ["own", "ring", "expanded"])
def test_generate_keeps_them_for_the_length_of_one_call(kind):
    model, tokens = ultramem_model("llama", kind), prompt(length=6)
    memories = [layer.memories["ultramem"] for layer in model.model.layers if hasattr(layer, "memories")]
    seen = []
    for memory in memories:
        memory.register_forward_pre_hook(lambda module, _: seen.append(not module.kept.is_empty))
    model.generate(tokens, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
    assert memories and seen and all(seen) and all(memory.kept.is_empty for memory in memories)

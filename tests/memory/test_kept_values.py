"""Values that each head has expanded are kept for one context or one `generate` call, and served nowhere else."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
from accelerate import cpu_offload
from models.upscaled import upscaled_model
from tiny import prompt
from transformers.optimization import Adafactor

from midus_hf.memory.headwise import HeadwiseMemory
from midus_hf.memory.kept_values import kept_values
from tests.memory.building import build


def acting_memory(values: str = "expanded") -> HeadwiseMemory:
    """A memory that retrieves something, in eval mode."""
    torch.manual_seed(0)
    memory = build("headwise", hidden_size=32, num_heads=4, head_dim=8, n=8, k=3, values=values).eval()
    with torch.no_grad():
        memory.value_bank.normal_()
    return memory


@pytest.fixture
def memory() -> HeadwiseMemory:
    return acting_memory()


@pytest.fixture
def inputs() -> torch.Tensor:
    return torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))


def output_without(memory: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return memory(inputs)


def output_with(memory: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), kept_values(memory):
        return memory(inputs)


def assert_close(output: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_the_context_keeps_them_and_computes_the_same(memory, inputs):
    with torch.no_grad():
        expected = memory(inputs)
        assert memory.kept.is_empty
        with kept_values(memory):
            assert memory.kept.num_bytes == 4 * 64 * 8 * 4
            kept = memory.kept.serve(memory, inputs)
            output = memory(inputs)
            assert torch.equal(memory(inputs), output) and memory.kept.serve(memory, inputs) is kept
    assert memory.kept.is_empty and memory.kept.num_bytes == 0
    assert_close(output, expected)
    assert torch.equal(output_without(memory, inputs), expected)


def test_what_is_read_is_what_was_kept(memory, inputs):
    """So that the other tests compare passes that differ."""
    with torch.no_grad(), kept_values(memory):
        before = memory(inputs)
        memory.kept._derived.mul_(2)
        assert_close(memory(inputs), 2 * before)


def test_an_exception_ends_it(memory, inputs):
    with pytest.raises(KeyError), kept_values(memory):
        raise KeyError
    assert memory.kept.is_empty


def test_an_inner_context_leaves_an_outer_one_its_values(memory, inputs):
    with torch.no_grad(), kept_values(memory):
        kept = memory.kept.serve(memory, inputs)
        with kept_values(torch.nn.Sequential(memory)):
            assert memory.kept.serve(memory, inputs) is kept
        assert memory.kept.serve(memory, inputs) is kept


@pytest.mark.parametrize("values", ["shared", "own"])
def test_values_that_are_not_expanded_keep_nothing(values, inputs):
    memory = acting_memory(values)
    expected = output_without(memory, inputs)
    with torch.no_grad(), kept_values(memory):
        assert memory.kept is None
        assert torch.equal(memory(inputs), expected)


def test_a_pass_with_gradients_does_without(memory, inputs):
    expected = memory(inputs)
    with kept_values(memory):
        output = memory(inputs)
        assert torch.equal(output, expected)
        output.sum().backward()
    assert memory.value_bank.grad.any()


def in_place(memory):
    memory.value_bank.mul_(2)


def through_data(memory):
    """As swaps of averaged weights do, which leave the version counter as it is."""
    memory.value_bank.data.mul_(2)


def other_data(memory):
    memory.value_transform.data = memory.value_transform.data + 1


def a_loaded_state(memory):
    memory.load_state_dict({name: tensor + 1 for name, tensor in memory.state_dict().items()})


def an_assigned_state(memory):
    memory.load_state_dict({name: tensor + 1 for name, tensor in memory.state_dict().items()}, assign=True)


def another_parameter(memory):
    memory.value_transform = torch.nn.Parameter(memory.value_transform + 1)


def a_merged_adapter(memory):
    """As LoRA merges: what it adds goes into the tensor of the weight."""
    memory.value_transform.data += torch.randn(8, 2) @ torch.randn(2, 8)


def rounding_to_integers(memory):
    """As weights are quantised and dequantised in their place."""
    scale = memory.value_bank.abs().max() / 7
    memory.value_bank.data = (memory.value_bank / scale).round() * scale


CHANGES = (
    in_place,
    through_data,
    other_data,
    a_loaded_state,
    an_assigned_state,
    another_parameter,
    a_merged_adapter,
    rounding_to_integers,
)


def of_torch(name: str, **options) -> Callable:
    return lambda parameters: getattr(torch.optim, name)(parameters, lr=0.1, **options)


PLAIN = ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
OPTIMIZERS = {
    **{f"{name} one by one": of_torch(name, foreach=False) for name in PLAIN},
    **{f"{name} foreach": of_torch(name, foreach=True) for name in PLAIN},
    **{f"{name} fused": of_torch(name, fused=True) for name in ("Adagrad", "Adam", "AdamW", "SGD")},
    "Adafactor of torch": of_torch("Adafactor"),
    "Adafactor of transformers": lambda parameters: Adafactor(
        parameters, lr=0.1, scale_parameter=False, relative_step=False
    ),
    "LBFGS": of_torch("LBFGS"),
}


def test_no_dense_optimizer_of_torch_is_left_out():
    known = {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    tested = {name.split()[0] for name in OPTIMIZERS}
    assert known - tested <= {"SparseAdam", "Muon"}  # of sparse gradients, and of matrices alone


EACH_WAY = {
    *(f"AdamW {how}" for how in ("one by one", "foreach", "fused")),
    *("Rprop one by one", "SGD foreach", "Adafactor of torch", "Adafactor of transformers", "LBFGS"),
}
"""Of optimizers, one for each way of writing into parameters. All run between eager passes, which see them by the same counters."""


@pytest.fixture(params=["eager", "compiled"])
def execution(request) -> Callable:
    """How passes and steps are run."""
    torch._dynamo.reset()
    yield (lambda module: module) if request.param == "eager" else lambda m: torch.compile(m, backend="aot_eager")
    torch._dynamo.reset()


def assert_never_stale(memory: HeadwiseMemory, run: Callable, inputs: torch.Tensor, change: Callable) -> None:
    """Passes with and without kept values after `change` are those of a copy that has never kept anything."""
    before, before_kept = output_without(run, inputs), None
    with torch.no_grad(), kept_values(memory):
        before_kept = run(inputs)
    change()
    fresh = copy.deepcopy(memory)
    expected = output_without(fresh, inputs)
    assert not torch.allclose(expected, before, atol=1e-3), "the change changed nothing"
    assert_close(output_without(run, inputs), expected)
    with torch.no_grad(), kept_values(memory):
        assert_close(run(inputs), expected)
    assert_close(run(inputs).detach(), expected)  # with gradients
    assert_close(before_kept, before)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_no_pass_returns_what_older_weights_gave(change, memory, inputs, execution):
    def changed():
        with torch.no_grad():
            change(memory)

    assert_never_stale(memory, execution(memory), inputs, changed)


@pytest.mark.parametrize(
    ("name", "execution"),
    [
        pytest.param(name, how, marks=[pytest.mark.product] if how == "compiled" and name not in EACH_WAY else [])
        for name in OPTIMIZERS
        for how in ("eager", "compiled")
    ],
    indirect=["execution"],
)
def test_no_pass_returns_what_weights_gave_before_an_optimizer_stepped(name, memory, inputs, execution):
    run = execution(memory)
    optimizer = OPTIMIZERS[name](list(memory.parameters()))

    def loss():
        optimizer.zero_grad()
        value = run(inputs).square().sum()
        value.backward()
        return value

    def step():
        # A pass without gradients between the backward pass and the step, as a callback of a trainer may run one.
        loss()
        output_without(run, inputs)
        output_without(memory, inputs)
        optimizer.step(loss) if name == "LBFGS" else optimizer.step()

    assert_never_stale(memory, run, inputs, step)


def test_a_compiled_fused_step_leaves_nothing_stale(memory, inputs):
    """The step itself in the graph: it writes parameters without any Python of torch's being run."""
    torch._dynamo.reset()
    optimizer = torch.optim.AdamW(memory.parameters(), lr=0.1, fused=True)

    @torch.compile(backend="aot_eager")
    def step():
        optimizer.step()

    def change():
        memory(inputs).square().sum().backward()
        step()

    assert_never_stale(memory, memory, inputs, change)


def test_compiled_passes_read_what_is_kept(memory, inputs, execution):
    run = execution(memory)
    with torch.no_grad():
        run(inputs)
        with kept_values(memory):
            before = run(inputs)
            memory.kept._derived.mul_(2)
            assert_close(run(inputs), 2 * before)
        assert_close(run(inputs), before)


def test_a_new_context_does_not_compile_again(memory, inputs):
    torch._dynamo.reset()
    graphs = []

    def counting(graph, _):
        graphs.append(graph)
        return graph.forward

    run = torch.compile(memory, backend=counting)
    for _ in range(4):
        output_with_run = output_of(run, memory, inputs)
    assert len(graphs) == 1
    assert_close(output_with_run, output_without(memory, inputs))


def output_of(run: Callable, memory: HeadwiseMemory, inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), kept_values(memory):
        return run(inputs)


def test_what_a_half_precision_pass_reads_is_half_precision(memory, inputs):
    memory.to(torch.bfloat16)
    with torch.no_grad(), kept_values(memory):
        assert memory.kept.serve(memory, inputs.bfloat16()).dtype == torch.bfloat16
        kept = memory(inputs.bfloat16())
    torch.testing.assert_close(kept, output_without(memory, inputs.bfloat16()), rtol=2e-2, atol=2e-2)


def test_under_autocast_they_have_the_dtype_of_the_pass(memory, inputs):
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad(), kept_values(memory):
        assert memory.kept.serve(memory, inputs.bfloat16()).dtype == torch.bfloat16
        assert memory.kept.serve(memory, inputs) is None  # another dtype's pass does without
        assert_close(memory(inputs), output_without(memory, inputs))


def test_a_cast_within_the_context_does_without(memory, inputs):
    with torch.no_grad(), kept_values(memory):
        memory.to(torch.bfloat16)
        expected = output_without(copy.deepcopy(memory), inputs.bfloat16())
        assert torch.equal(memory(inputs.bfloat16()), expected)


def test_it_is_neither_saved_nor_copied_nor_pickled(memory, inputs):
    with torch.no_grad(), kept_values(memory):
        assert set(memory.state_dict()) == {"row_keys", "column_keys", "value_bank", "value_transform"}
        assert not list(memory.buffers())
        file = io.BytesIO()
        torch.save(memory, file)
        file.seek(0)
        for other in (copy.deepcopy(memory), torch.load(file, weights_only=False)):
            assert other.kept.is_empty
            assert_close(other(inputs), memory(inputs))
            other.value_bank.add_(1)
            assert_close(output_with(other, inputs), output_without(other, inputs))
        assert not memory.kept.is_empty


def test_it_is_not_kept_where_parameters_come_and_go(memory, inputs):
    expected = output_without(memory, inputs)
    offloaded = cpu_offload(copy.deepcopy(memory), execution_device=torch.device("cpu"))
    with torch.no_grad(), kept_values(offloaded):
        assert offloaded.kept.is_empty
        assert torch.equal(offloaded(inputs), expected)


@pytest.mark.parametrize("left", [torch.empty(0), torch.empty(64, 8, device="meta")], ids=["sharded-away", "meta"])
def test_it_is_not_kept_of_parameters_that_are_not_there(memory, left):
    memory.value_bank = torch.nn.Parameter(left)
    with kept_values(memory):
        assert memory.kept.is_empty


def test_it_does_not_serve_what_only_stands_for_a_parameter(memory, inputs):
    with torch.no_grad(), kept_values(memory):
        stand_in = {"value_bank": memory.value_bank + 1}
        shifted = torch.func.functional_call(memory, stand_in, (inputs,))
    with torch.no_grad():
        memory.value_bank.add_(1)
    assert torch.equal(shifted, output_without(memory, inputs))


def test_values_kept_in_inference_mode_serve_there(memory, inputs):
    with torch.inference_mode(), kept_values(memory):
        kept = memory(inputs)
    assert_close(kept, output_without(memory, inputs))
    memory(inputs).sum().backward()
    assert memory.value_bank.grad.any()


def test_generate_keeps_them_for_the_length_of_one_call(family):
    model = upscaled_model(family)
    memories = [layer.memory for layer in model.model.layers if hasattr(layer, "memory")]
    seen = []
    for memory in memories:
        memory.register_forward_pre_hook(lambda module, _: seen.append(not module.kept.is_empty))
    settings = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    generated = model.generate(prompt(), **settings)
    assert len(memories) == 2 and len(seen) == 16 and all(seen)
    assert all(memory.kept.is_empty for memory in memories)

    seen.clear()
    with torch.no_grad():
        logits = model(generated.sequences, use_cache=False).logits[:, prompt().shape[1] - 1 : -1]
    assert len(seen) == 2 and not any(seen)
    torch.testing.assert_close(torch.stack(generated.logits, dim=1), logits, rtol=1e-4, atol=1e-4)


def test_generate_follows_weights_that_changed_since_the_last_call():
    model = upscaled_model("llama")
    settings = {"max_new_tokens": 1, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    before = model.generate(prompt(), **settings).logits[0]
    for layer in model.model.layers:
        if hasattr(layer, "memory"):
            layer.memory.value_bank.data.mul_(30)
    after = model.generate(prompt(), **settings).logits[0]
    expected = copy.deepcopy(model)(prompt()).logits[:, -1]
    assert not torch.allclose(after, before, atol=1e-2)
    torch.testing.assert_close(after, expected.detach(), rtol=1e-4, atol=1e-4)

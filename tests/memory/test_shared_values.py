"""Product-key and linear memory: what they start as, what they compute, what they learn first, and what they refuse."""

import copy

import pytest
import torch
from config.reading import read_entry
from tiny import FAMILIES

from midus_hf.config.memory_entries import read_memories
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.memory.registry import build_memory
from midus_hf.memory.shared_values import LinearMemory, ProductKeyMemory
from midus_hf.ops import op_choices
from tests.memory.building import build
from tests.memory.loops import memory_by_loops

KEYS = {ProductKeyMemory: ("row_keys", "column_keys"), LinearMemory: ("slot_keys",)}


@pytest.fixture(params=KEYS, ids=lambda memory_class: memory_class.__name__)
def memory_class(request) -> type:
    """Each memory whose heads share values of full width, in turn."""
    return request.param


def layer(memory_class, hidden_size=24, num_heads=4, size=6, k=2, seed=0, **options):
    """A memory of 36 slots or, if linear, of six; in training mode, as any new module."""
    torch.manual_seed(seed)
    sizes = {"n" if memory_class is ProductKeyMemory else "slots": size}
    return build(memory_class.memory_type, hidden_size=hidden_size, num_heads=num_heads, k=k, **sizes, **options)


def acting(memory, seed=1):
    """The memory with every parameter and buffer moved off its start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in memory.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
            tensor.copy_(noise.abs() + 0.1 if name == "query_variance" else noise)
    return memory


def attention_output(memory, batch=2, tokens=7, seed=1) -> torch.Tensor:
    width = memory.num_heads * memory.query_width
    return torch.randn(batch, tokens, width, generator=torch.Generator().manual_seed(seed))


def test_parameters_have_the_shapes_of_the_paper(memory_class):
    shapes = {name: tuple(tensor.shape) for name, tensor in layer(memory_class).named_parameters()}
    keys = (
        {"row_keys": (4, 6, 3), "column_keys": (4, 6, 3)}
        if memory_class is ProductKeyMemory
        else {"slot_keys": (4, 6, 6)}
    )
    slots = 36 if memory_class is ProductKeyMemory else 6
    assert shapes == {"query_projection.weight": (24, 24), "value_bank": (slots, 24), **keys}


def test_values_start_at_zero_and_the_rest_at_the_documented_scale(memory_class):
    memory = layer(memory_class, hidden_size=256, num_heads=4, size=32, query_norm="batch")
    assert not memory.value_bank.any()
    weight = memory.query_projection.weight.detach()
    assert weight.std().item() == pytest.approx(256**-0.5, rel=0.02) and abs(weight.mean()) < 1e-3
    bound = (32 if memory_class is ProductKeyMemory else 64) ** -0.5
    for name in KEYS[memory_class]:
        keys = getattr(memory, name).detach()
        assert 0.97 * bound < keys.abs().max() <= bound
        assert keys.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
        assert not torch.equal(keys[0], keys[1])
    assert torch.equal(memory.query_norm_weight, torch.ones(4, 64)) and not memory.query_norm_bias.any()
    assert torch.equal(memory.query_variance, torch.ones(4, 64)) and not memory.query_mean.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_generator_gives_the_same_bytes(memory_class, dtype):
    memory = layer(memory_class, query_norm="batch", gate="token")
    for name, tensor in memory.state_dict().items():
        first, second = (torch.full_like(tensor, 5.0, dtype=dtype) for _ in range(2))
        for filled in (first, second):
            memory.declared[name].initial.fill(filled, torch.Generator().manual_seed(3))
        assert torch.equal(first, second) and not (first == 5.0).any(), name


def test_a_family_initialises_the_projection_as_the_memory_says(family, memory_class):
    """Transformers' own initialisation of linear layers, with a deviation of 0.02, must not come last."""
    from models.upscaled import memory_config
    from tiny import tiny_model
    from transformers import AutoModelForCausalLM

    config = memory_config(
        tiny_model(family, hidden_size=64), memory_type=memory_class.memory_type, query_norm="batch"
    )
    torch.manual_seed(0)
    memory = AutoModelForCausalLM.from_config(config).model.layers[1].memory
    assert memory.query_projection.weight.std().item() == pytest.approx(1 / 8, rel=0.1)
    assert torch.equal(memory.query_variance, torch.ones_like(memory.query_variance)) and not memory.value_bank.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("training", [True, False])
def test_a_new_layer_returns_zeros_and_leaves_the_residual_stream_as_it_is(memory_class, dtype, training):
    memory = layer(memory_class, query_norm="batch", gate="token").to(dtype).train(training)
    output = memory(attention_output(memory).to(dtype))
    assert output.shape == (2, 7, 24) and output.dtype == dtype
    stream = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(output, torch.zeros_like(output)) and torch.equal(stream + output, stream)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("query_norm", ["none", "batch", "layer"])
@pytest.mark.parametrize(("gate", "temperature", "k"), [("none", 1.0, 1), ("none", 0.3, 4), ("token", 2, 6)])
def test_output_and_statistics_are_those_of_the_equations(memory_class, query_norm, gate, temperature, k, training):
    memory = layer(memory_class, k=k, query_norm=query_norm, gate=gate, temperature=temperature)
    acting(memory.double().train(training))
    inputs = attention_output(memory).double()
    expected, state = memory_by_loops(memory, inputs)
    torch.testing.assert_close(memory(inputs), expected, rtol=1e-10, atol=1e-12)
    for name, tensor in memory.state_dict().items():
        torch.testing.assert_close(tensor, state[name], rtol=1e-10, atol=1e-12, msg=name)


def test_gradients_are_those_of_finite_differences(memory_class):
    memory = acting(layer(memory_class, hidden_size=8, num_heads=2, size=3, query_norm="batch", gate="token").double())
    inputs = attention_output(memory, 1, 4).double().requires_grad_()
    parameters = dict(memory.named_parameters())

    def computed(inputs, *values):
        return torch.func.functional_call(memory, dict(zip(parameters, values, strict=True)), (inputs,))

    assert torch.autograd.gradcheck(computed, (inputs, *parameters.values()))


def test_the_first_step_moves_the_values_alone_and_the_second_everything(memory_class):
    memory = layer(memory_class, query_norm="batch", gate="token")
    inputs = attention_output(memory).requires_grad_()
    target = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(2))
    optimizer = torch.optim.SGD(memory.parameters(), lr=0.1)
    (memory(inputs) - target).square().sum().backward()
    assert [name for name, parameter in memory.named_parameters() if parameter.grad.any()] == ["value_bank"]
    assert not inputs.grad.any()
    optimizer.step()
    optimizer.zero_grad()
    (memory(inputs) - target).square().sum().backward()
    assert all(parameter.grad.any() for parameter in memory.parameters()) and inputs.grad.any()


def test_every_head_writes_to_the_whole_width_and_heads_are_summed(memory_class):
    memory = acting(layer(memory_class))
    inputs = attention_output(memory)
    weights, slots = memory.retrieve(inputs)
    by_head = (weights.unsqueeze(-1) * memory.value_bank[slots]).sum(-2)  # [B, T, H, D]
    assert by_head.shape == (2, 7, 4, 24) and by_head.any(-1).all()
    torch.testing.assert_close(memory(inputs), by_head.sum(-2))


def test_tokens_do_not_see_each_other_once_trained(memory_class):
    memory = acting(layer(memory_class, query_norm="batch")).eval()
    inputs = attention_output(memory, batch=1, tokens=6)
    changed = inputs.clone()
    changed[:, 3] += 1
    difference = (memory(inputs) - memory(changed)).abs().amax(-1)[0] > 1e-5
    assert difference.tolist() == [False, False, False, True, False, False]


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_every_body_of_the_ops_computes_the_same(memory_class, backend):
    memory = acting(layer(memory_class, query_norm="layer"))
    inputs = attention_output(memory)
    with op_choices(backend=backend):
        output = memory(inputs)
    torch.testing.assert_close(output, memory(inputs))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("batch", "tokens"), [(0, 3), (1, 1), (2, 0)])
def test_empty_and_one_token_batches_run(memory_class, batch, tokens, training):
    memory = acting(layer(memory_class, query_norm="batch")).train(training)
    before = copy.deepcopy(memory.state_dict())
    output = memory(attention_output(memory, batch, tokens))
    assert output.shape == (batch, tokens, 24) and output.isfinite().all()
    moved = not torch.equal(before["query_mean"], memory.query_mean)
    assert moved == (training and batch * tokens > 0)


@pytest.mark.parametrize("name", ["product-key", "linear"])
def test_a_block_of_any_family_holds_one_with_the_options_of_its_entry(family, name):
    config = FAMILIES[family].config()
    sizes = {"n": 5} if name == "product-key" else {"slots": 9}
    entry = {"type": name, "layers": [0], "k": 3, "query_norm": "layer", "gate": "token", "temperature": 2, **sizes}
    (read,) = read_memories([entry], ModelSizes.of(config)).entries
    memory = build_memory(read.options, ModelSizes.of(config))
    assert (memory.k, memory.query_norm, memory.gate, memory.temperature) == (3, "layer", "token", 2)
    assert memory.query_width == config.hidden_size // config.num_attention_heads
    assert memory(torch.randn(2, 3, config.hidden_size)).shape == (2, 3, config.hidden_size)


def test_their_text_names_their_sizes():
    assert "num_heads=4, n=6, k=2, query_norm=none" in repr(layer(ProductKeyMemory))
    assert "num_heads=4, slots=6, k=2, query_norm=batch" in repr(layer(LinearMemory, query_norm="batch"))


def test_sizes_that_do_not_fit_are_refused(memory_class):
    with pytest.raises(ValueError, match="hidden_size is 26; expected a multiple of the 4 attention heads"):
        layer(memory_class, hidden_size=26)


def test_queries_that_cannot_be_halved_are_refused_by_product_keys_alone():
    with pytest.raises(
        ValueError, match="hidden_size / num_attention_heads is 5; expected an even number, half for rows"
    ):
        layer(ProductKeyMemory, hidden_size=20)
    assert layer(LinearMemory, hidden_size=20).query_width == 5


def test_by_default_they_are_as_in_the_paper():
    for name, size in (("product-key", {"n": 64}), ("linear", {"slots": 4096})):
        options = read_entry({"type": name, "layers": [1]}).options
        assert {key: getattr(options, key) for key in size} == size
        assert (options.k, options.query_norm, options.temperature, options.gate) == (4, "batch", 1.0, "none")
        assert options.keeps_output_projection and options.adds_block_input

"""Norms of queries, temperature and gates, which every memory may have; running statistics under checkpointing."""

import copy

import pytest
import torch
from config.reading import read_entry
from models.upscaled import upscaled_model, upscaled_pair
from tiny import prompt
from torch.utils.checkpoint import checkpoint

from tests.memory.building import build
from tests.memory.loops import memory_by_loops

BUILDERS = {
    "headwise": lambda **options: build("headwise", hidden_size=12, num_heads=3, head_dim=6, n=5, k=2, **options),
    "product-key": lambda **options: build("product-key", hidden_size=12, num_heads=3, n=5, k=2, **options),
    "linear": lambda **options: build("linear", hidden_size=12, num_heads=3, slots=5, k=2, **options),
}


@pytest.fixture(params=BUILDERS)
def memory_type(request) -> str:
    """Each type of memory, in turn."""
    return request.param


def acting(memory_type, seed=0, **options):
    """A memory with every tensor moved off its start value, in training mode."""
    memory = BUILDERS[memory_type](**options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in memory.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(noise.abs() + 0.1 if name == "query_variance" else noise)
    return memory


def inputs_of(memory, tokens=7, seed=1):
    width = memory.gate_weight.shape[1] if memory.gate != "none" else memory.num_heads * memory.query_width
    return torch.randn(2, tokens, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("values", ["expanded", "shared", "own"])
@pytest.mark.parametrize("query_norm", ["none", "batch", "layer"])
@pytest.mark.parametrize(("gate", "temperature"), [("none", 1.0), ("token", 0.4), ("head", 3)])
@pytest.mark.parametrize("training", [True, False])
def test_head_wise_memory_is_that_of_the_equations_with_every_option(values, query_norm, gate, temperature, training):
    memory = acting("headwise", values=values, query_norm=query_norm, gate=gate, temperature=temperature)
    memory.double().train(training)
    inputs = inputs_of(memory).double()
    expected, state = memory_by_loops(memory, inputs)
    torch.testing.assert_close(memory(inputs), expected, rtol=1e-10, atol=1e-12)
    with torch.no_grad():  # values expanded once for all, where it is inference
        torch.testing.assert_close(memory.eval()(inputs), memory_by_loops(memory, inputs)[0], rtol=1e-10, atol=1e-12)
    for name in memory.state_dict():
        if training and name in ("query_mean", "query_variance"):
            torch.testing.assert_close(memory.state_dict()[name], state[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_that_of_pytorch(memory_type, dtype):
    memory = acting(memory_type, query_norm="batch").to(dtype)
    query = torch.randn(2, 7, 3, memory.query_width, generator=torch.Generator().manual_seed(2)).to(dtype)
    norm = torch.nn.BatchNorm1d(3 * memory.query_width)
    norm.load_state_dict(
        {
            "weight": memory.query_norm_weight.flatten(),
            "bias": memory.query_norm_bias.flatten(),
            "running_mean": memory.query_mean.flatten(),
            "running_var": memory.query_variance.flatten(),
            "num_batches_tracked": torch.tensor(0),
        }
    )
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for training in (True, False):
        memory.train(training), norm.train(training)
        expected = norm(query.float().view(14, -1)).view(query.shape)
        assert memory.normalised(query).dtype == dtype
        torch.testing.assert_close(memory.normalised(query).float(), expected, **tolerance)
        memory.load_state_dict(
            memory.state_dict()
            | {"query_mean": norm.running_mean.view(3, -1), "query_variance": norm.running_var.view(3, -1)}
        )


def test_a_layer_norm_is_that_of_each_heads_query(memory_type):
    memory = acting(memory_type, query_norm="layer")
    query = torch.randn(2, 7, 3, memory.query_width, generator=torch.Generator().manual_seed(2))
    for head in range(3):
        gain, bias = memory.query_norm_weight[head], memory.query_norm_bias[head]
        expected = torch.nn.functional.layer_norm(query[..., head, :], (memory.query_width,), gain, bias)
        torch.testing.assert_close(memory.normalised(query)[..., head, :], expected)


def test_a_batch_norm_with_a_frozen_gain_stays_as_it_is_in_training_mode(memory_type):
    memory = acting(memory_type, query_norm="batch").eval()
    inputs = inputs_of(memory)
    expected, before = memory(inputs), copy.deepcopy(memory.state_dict())
    memory.query_norm_weight.requires_grad_(False)
    assert torch.equal(memory.train()(inputs), expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in memory.state_dict().items())
    memory.query_norm_weight.requires_grad_(True)
    assert not torch.allclose(memory(inputs), expected)
    assert not torch.equal(memory.query_mean, before["query_mean"])


def test_a_batch_norm_leaves_tokens_alone_in_eval_mode_and_its_statistics_as_they_are(memory_type):
    memory = acting(memory_type, query_norm="batch").eval()
    before = copy.deepcopy(memory.state_dict())
    inputs = inputs_of(memory)
    torch.testing.assert_close(memory(inputs)[:, :3], memory(inputs[:, :3]))
    assert all(torch.equal(before[name], tensor) for name, tensor in memory.state_dict().items())


def test_looking_at_what_is_retrieved_changes_no_statistics(memory_type):
    memory = acting(memory_type, query_norm="batch")
    before = memory.query_mean.clone()
    memory.retrieve(inputs_of(memory))
    assert torch.equal(memory.query_mean, before)
    memory(inputs_of(memory))
    assert not torch.equal(memory.query_mean, before)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_statistics_are_updated_once_though_checkpointing_runs_the_forward_twice(memory_type, use_reentrant):
    plain, repeated = acting(memory_type, query_norm="batch"), acting(memory_type, query_norm="batch")
    calls = []
    repeated.register_forward_pre_hook(lambda *_: calls.append(1))
    inputs = inputs_of(plain)
    plain(inputs.requires_grad_()).square().sum().backward()
    checkpoint(repeated, inputs.detach().requires_grad_(), use_reentrant=use_reentrant).square().sum().backward()
    assert len(calls) == 2
    assert torch.equal(plain.query_mean, repeated.query_mean)
    assert torch.equal(plain.query_variance, repeated.query_variance)
    for one, other in zip(plain.parameters(), repeated.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_so_are_those_of_a_whole_model(memory_type, use_reentrant):
    states = []
    for checkpointed in (False, True):
        model = upscaled_model("llama", memory_type=memory_type, memory_options={"query_norm": "batch"}).train()
        if checkpointed:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": use_reentrant})
        model(prompt(), labels=prompt(), use_cache=False).loss.backward()
        states.append({name: buffer.clone() for name, buffer in model.named_buffers() if ".memory." in name})
    assert len(states[0]) == 4 and all(states[0][name].any() for name in states[0])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_statistics_converge_to_those_of_the_data(memory_type):
    memory = acting(memory_type, query_norm="batch")
    inputs = inputs_of(memory, tokens=500)
    for _ in range(150):
        memory.queries(inputs)
    training = memory.queries(inputs, track_statistics=False)
    torch.testing.assert_close(memory.eval().queries(inputs), training, rtol=1e-2, atol=1e-2)


def test_a_low_temperature_takes_the_best_slot_alone_and_a_high_one_all_alike(memory_type):
    cold, warm = acting(memory_type, temperature=1e-4), acting(memory_type, temperature=1e4)
    inputs = inputs_of(cold)
    torch.testing.assert_close(cold.retrieve(inputs)[0].amax(-1).median(), torch.tensor(1.0))
    weights, slots = warm.retrieve(inputs)
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / warm.k), rtol=1e-2, atol=1e-2)
    assert torch.equal(slots, cold.retrieve(inputs)[1])


@pytest.mark.parametrize("gate", ["none", "token"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
def test_a_residual_is_added_to_what_is_retrieved_and_kept_bit_for_bit_where_values_are_zero(
    memory_type, gate, dtype, tolerance
):
    memory = acting(memory_type, gate=gate).to(dtype)
    inputs = inputs_of(memory).to(dtype)
    stream = torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(3)).to(dtype)
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            torch.testing.assert_close(
                memory.eval()(inputs, stream), stream + memory(inputs), rtol=tolerance, atol=tolerance
            )
    with torch.no_grad():
        memory.value_bank.zero_()
        assert torch.equal(memory(inputs, stream), stream)
        assert torch.equal(memory.train()(inputs, stream), stream)


@pytest.mark.parametrize(
    "memory_type, gate", [("headwise", "token"), ("headwise", "head"), ("product-key", "token"), ("linear", "token")]
)
def test_gates_start_half_open(memory_type, gate):
    bare, gated = BUILDERS[memory_type](), BUILDERS[memory_type](gate=gate)
    gated.load_state_dict(bare.state_dict(), strict=False)
    with torch.no_grad():
        bare.value_bank.normal_(generator=torch.Generator().manual_seed(0))
        gated.value_bank.copy_(bare.value_bank)
    inputs = inputs_of(bare)
    torch.testing.assert_close(gated(inputs), bare(inputs) / 2)


def test_a_gate_a_head_closes_that_head_alone():
    memory = acting("headwise", gate="head")
    inputs = inputs_of(memory)
    before = memory(inputs)
    with torch.no_grad():
        memory.gate_weight[1], memory.gate_bias[1] = 0, -1e4
    output = memory(inputs)
    assert not output[..., 4:8].any()
    assert torch.equal(output[..., :4], before[..., :4]) and torch.equal(output[..., 8:], before[..., 8:])


@pytest.mark.parametrize(
    "options", [{"output_projection": True}, {"output_projection": True, "inner_residual": True}, {}]
)
def test_a_block_keeps_and_adds_what_its_entry_says(family, options):
    """The memory reads the family's own attention, through its projection and norm, and the block's input beside it."""
    base, model = upscaled_pair(family, memory_options=options)
    block, donor = model.model.layers[1], base.model.layers[1]
    read, given = [], []
    block.memory.register_forward_pre_hook(lambda module, arguments: read.append(arguments[0]))
    block.register_forward_pre_hook(
        lambda module, arguments, keywords: given.append((arguments, keywords)), with_kwargs=True
    )
    with torch.no_grad():
        model(prompt(), use_cache=False)
        (hidden_states,), keywords = given[0]
        expected = donor.self_attn(hidden_states=donor.input_layernorm(hidden_states), **keywords)[0]
        if family.startswith("gemma"):
            expected = donor.post_attention_layernorm(expected)
        if options.get("inner_residual"):
            expected = hidden_states + expected
    if options:
        assert torch.equal(read[0], expected)
    else:
        assert not hasattr(block.self_attn, "o_proj") or not isinstance(block.self_attn.o_proj, torch.nn.Module)
        assert read[0].shape[-1] == donor.self_attn.o_proj.in_features


@pytest.mark.parametrize("memory_type, keeps", [("headwise", False), ("product-key", True), ("linear", True)])
def test_what_a_block_keeps_is_said_by_the_options(memory_type, keeps):
    options = read_entry({"type": memory_type, "layers": [0]}).options
    assert (options.keeps_output_projection, options.adds_block_input) == (keeps, keeps)
    options = read_entry({"type": memory_type, "layers": [0], "inner_residual": not keeps}).options
    assert options.adds_block_input != keeps


def test_a_residual_between_unequal_widths_is_refused():
    message = (
        r"input of width 32 to an attention output of width 64; expected equal widths\. Set output_projection to true"
    )
    with pytest.raises(ValueError, match=message):
        upscaled_model("qwen3", memory_options={"inner_residual": True})
    upscaled_model("qwen3", memory_options={"inner_residual": True, "output_projection": True})

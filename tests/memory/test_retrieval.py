"""Memories whose heads retrieve slots: what they start as, compute with every option, learn first, and refuse."""

import copy

import pytest
import torch
from config.reading import read_entry
from memory.building import acting, read_by, retrieving
from models.upscaled import memory_config, upscaled_model, upscaled_pair
from tiny import FAMILIES, prompt, tiny_model
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from midus_hf.config.model_sizes import ModelSizes
from midus_hf.memories.entries import read_memories
from midus_hf.memories.module import build_memory
from tests.memory.loops import memory_by_loops

SHAPES = {
    "headwise": {"row_keys": (4, 6, 3), "column_keys": (4, 6, 3), "value_bank": (36, 6), "value_transform": (4, 6, 6)},
    "product-key": {
        "query_projection.weight": (24, 24),
        "row_keys": (4, 6, 3),
        "column_keys": (4, 6, 3),
        "value_bank": (36, 24),
    },
    "linear": {"query_projection.weight": (24, 24), "slot_keys": (4, 6, 6), "value_bank": (6, 24)},
}


def test_parameters_have_the_shapes_and_roles_of_the_paper(memory_type):
    memory = retrieving(memory_type)
    assert {name: tuple(tensor.shape) for name, tensor in memory.named_parameters()} == SHAPES[memory_type]
    report = {name for name in SHAPES[memory_type] if name.endswith("_keys") or name == "value_bank"}
    assert set(memory.names_of("key", "value")) == report


def test_values_start_at_zero_and_the_rest_at_the_documented_scale(memory_type):
    memory = retrieving(memory_type, hidden_size=256, size=32, query_norm="batch")
    assert not memory.value_bank.any()
    projection = {"headwise": "value_transform"}.get(memory_type, "query_projection.weight")
    weight = memory.get_parameter(projection).detach()
    assert weight.std().item() == pytest.approx(weight.shape[-1] ** -0.5, rel=0.02) and abs(weight.mean()) < 5e-3
    for name in memory.names_of("key"):
        keys = memory.get_parameter(name).detach()
        bound = keys.shape[-1] ** -0.5
        assert 0.97 * bound < keys.abs().max() <= bound and abs(keys.mean()) < 0.01
        assert keys.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
        assert not torch.equal(keys[0], keys[1])
    assert len({memory.get_parameter(name).sum().item() for name in memory.names_of("key")}) == len(
        memory.names_of("key")
    )
    for name, start in (("weight", 1), ("bias", 0)):
        assert (getattr(memory, f"query_norm_{name}") == start).all()
    assert (memory.query_variance == 1).all() and not memory.query_mean.any()


@pytest.mark.parametrize("name", ["product-key", "linear"])
def test_a_family_initialises_the_projection_as_the_memory_says(family, name):
    """Transformers' own initialisation of linear layers, with a deviation of 0.02, must not come last."""
    config = memory_config(tiny_model(family, hidden_size=64), memory_type=name, query_norm="batch")
    torch.manual_seed(0)
    memory = AutoModelForCausalLM.from_config(config).model.layers[1].memory
    assert memory.query_projection.weight.std().item() == pytest.approx(1 / 8, rel=0.1)
    assert (memory.query_variance == 1).all() and not memory.value_bank.any()


def test_the_first_step_moves_the_values_alone_and_the_second_everything(memory_type):
    memory = retrieving(memory_type, query_norm="batch")
    inputs = read_by(memory).requires_grad_()
    target = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(2))
    optimizer = torch.optim.SGD(memory.parameters(), lr=0.1)
    (memory(inputs) - target).square().sum().backward()
    assert [name for name, parameter in memory.named_parameters() if parameter.grad.any()] == ["value_bank"]
    assert not inputs.grad.any()
    optimizer.step()
    optimizer.zero_grad()
    (memory(inputs) - target).square().sum().backward()
    assert all(parameter.grad.any() for parameter in memory.parameters()) and inputs.grad.any()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("query_norm", ["none", "batch", "layer"])
def test_output_and_statistics_are_those_of_the_equations(memory_type, query_norm, training):
    for k in (1, 5):
        memory = retrieving(memory_type, k=k, query_norm=query_norm)
        acting(memory.double().train(training))
        inputs = read_by(memory)
        expected, state = memory_by_loops(memory, inputs)
        torch.testing.assert_close(memory(inputs), expected, rtol=1e-10, atol=1e-12)
        for name, tensor in memory.state_dict().items():
            torch.testing.assert_close(tensor, state[name], rtol=1e-10, atol=1e-12, msg=name)
        with torch.no_grad():  # values expanded once for all, where it is inference
            expected, _ = memory_by_loops(memory.eval(), inputs)
            torch.testing.assert_close(memory(inputs), expected, rtol=1e-10, atol=1e-12)


def test_gradients_are_those_of_finite_differences(memory_type):
    memory = retrieving(memory_type, hidden_size=8, num_heads=2, size=3, query_norm="batch").double()
    inputs = read_by(acting(memory), 1, 4).requires_grad_()
    parameters = dict(memory.named_parameters())

    def computed(inputs, *values):
        return torch.func.functional_call(memory, dict(zip(parameters, values, strict=True)), (inputs,))

    assert torch.autograd.gradcheck(computed, (inputs, *parameters.values()))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("batch", "tokens"), [(0, 3), (1, 1), (2, 0)])
def test_empty_and_one_token_batches_run(memory_type, batch, tokens, training):
    memory = acting(retrieving(memory_type, query_norm="batch")).train(training)
    before = memory.query_mean.clone()
    output = memory(read_by(memory, batch, tokens))
    assert output.shape == (batch, tokens, 24) and output.isfinite().all()
    assert torch.equal(before, memory.query_mean) != (training and batch * tokens > 0)


def test_a_block_of_any_family_holds_one_with_the_options_of_its_entry(family, memory_type):
    config, size = FAMILIES[family].config(), "slots" if memory_type == "linear" else "n"
    options = {"k": 3, "query_norm": "layer"}
    entry = {"type": memory_type, "layers": [0], size: 9, **options}
    (read,) = read_memories([entry], ModelSizes.from_config(config)).entries
    memory = build_memory(read.options, ModelSizes.from_config(config))
    assert {name: getattr(memory, name) for name in options} == options
    assert len(memory.value_bank) == (9 if memory_type == "linear" else 81)
    share = config.hidden_size // config.num_attention_heads
    width_of_query = (getattr(config, "head_dim", None) or share) if memory_type == "headwise" else share
    assert memory.query_width == width_of_query
    assert memory_type != "headwise" or (memory.head_dim, memory.value_dim) == (width_of_query, share)
    width = config.num_attention_heads * width_of_query
    assert memory(torch.randn(2, 3, width)).shape == (2, 3, config.hidden_size)


def test_their_text_names_the_options_that_differ_from_defaults():
    assert repr(retrieving("headwise")) == "HeadwiseMemory(k=2, n=6)"
    assert "\n  k=2, query_norm=none, n=6\n" in repr(retrieving("product-key"))
    assert "\n  k=2, slots=6\n" in repr(retrieving("linear", query_norm="batch"))


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        *(
            (name, {"hidden_size": 26}, "hidden_size is 26; expected a multiple of the 4 attention heads")
            for name in SHAPES
        ),
        ("headwise", {"head_dim": 15}, "head_dim is 15; expected an even number, half for rows and half for columns"),
        ("headwise", {"k": 7}, r"k is 7; expected 1 <= k <= n = 6\. Lower k or raise n"),
        (
            "product-key",
            {"hidden_size": 20},
            "hidden_size / num_attention_heads is 5; expected an even number, half for rows",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(name, sizes, message):
    with pytest.raises(ValueError, match=message):
        retrieving(name, **sizes)


def test_queries_of_linear_memory_need_not_be_halved():
    assert retrieving("linear", hidden_size=20).query_width == 5


def test_by_default_they_are_as_in_the_paper():
    for name, size in (("product-key", {"n": 64}), ("linear", {"slots": 4096})):
        options = read_entry({"type": name, "layers": [1]}).options
        assert {key: getattr(options, key) for key in size} == size
        assert (options.k, options.query_norm) == (4, "batch")
        assert options.output_projection and options.inner_residual


def small(memory_type, **options):
    """Build a memory of three heads with queries of six numbers, or four if they are projected, in training mode."""
    width = {"head_dim": 6} if memory_type == "headwise" else {}
    return retrieving(memory_type, hidden_size=12, num_heads=3, size=5, **width, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_that_of_pytorch(memory_type, dtype):
    memory = acting(small(memory_type, query_norm="batch")).to(dtype)
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
    memory = acting(small(memory_type, query_norm="layer"))
    query = torch.randn(2, 7, 3, memory.query_width, generator=torch.Generator().manual_seed(2))
    for head in range(3):
        gain, bias = memory.query_norm_weight[head], memory.query_norm_bias[head]
        expected = torch.nn.functional.layer_norm(query[..., head, :], (memory.query_width,), gain, bias)
        torch.testing.assert_close(memory.normalised(query)[..., head, :], expected)


def test_a_batch_norm_with_a_frozen_gain_stays_as_it_is_in_training_mode(memory_type):
    memory = acting(small(memory_type, query_norm="batch")).eval()
    inputs = read_by(memory)
    expected, before = memory(inputs), copy.deepcopy(memory.state_dict())
    memory.query_norm_weight.requires_grad_(False)
    assert torch.equal(memory.train()(inputs), expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in memory.state_dict().items())
    memory.query_norm_weight.requires_grad_(True)
    assert not torch.allclose(memory(inputs), expected)
    assert not torch.equal(memory.query_mean, before["query_mean"])


def test_looking_at_what_is_retrieved_changes_no_statistics(memory_type):
    memory = acting(retrieving(memory_type, query_norm="batch"))
    before = memory.query_mean.clone()
    memory.retrieve(read_by(memory))
    assert torch.equal(memory.query_mean, before)
    memory(read_by(memory))
    assert not torch.equal(memory.query_mean, before)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_statistics_are_updated_once_though_checkpointing_runs_the_forward_twice(memory_type, use_reentrant):
    plain, repeated = acting(small(memory_type, query_norm="batch")), acting(small(memory_type, query_norm="batch"))
    calls = []
    repeated.register_forward_pre_hook(lambda *_: calls.append(1))
    inputs = read_by(plain)
    plain(inputs.requires_grad_()).square().sum().backward()
    checkpoint(repeated, inputs.detach().requires_grad_(), use_reentrant=use_reentrant).square().sum().backward()
    assert len(calls) == 2
    assert torch.equal(plain.query_mean, repeated.query_mean)
    assert torch.equal(plain.query_variance, repeated.query_variance)
    for one, other in zip(plain.parameters(), repeated.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
def test_a_residual_is_added_to_what_is_retrieved_and_kept_bit_for_bit_where_values_are_zero(
    memory_type, dtype, tolerance
):
    memory = acting(small(memory_type)).to(dtype)
    inputs = read_by(memory)
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
    "options", [{"output_projection": True}, {"output_projection": True, "inner_residual": True}, {}]
)
def test_a_block_keeps_and_adds_what_its_entry_says(family, options):
    """The memory reads the family's own attention, through its projection and norm, and the block's input beside it."""
    base, model = upscaled_pair(family, memory_options=options)
    block, donor = model.model.layers[1], base.model.layers[1]
    read, values = [], []
    block.memory.register_forward_pre_hook(lambda module, arguments: read.append(arguments[0]))
    block.register_forward_pre_hook(
        lambda module, arguments, keywords: values.append((arguments, keywords)), with_kwargs=True
    )
    with torch.no_grad():
        model(prompt(), use_cache=False)
        (hidden_states,), keywords = values[0]
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
    assert (options.output_projection, options.inner_residual) == (keeps, keeps)
    options = read_entry({"type": memory_type, "layers": [0], "inner_residual": not keeps}).options
    assert options.inner_residual != keeps


def test_a_residual_between_unequal_widths_is_refused():
    message = (
        r"input of width 32 to an attention output of width 64; expected equal widths\. Set output_projection to true"
    )
    with pytest.raises(ValueError, match=message):
        upscaled_model("qwen3", memory_options={"inner_residual": True})
    upscaled_model("qwen3", memory_options={"inner_residual": True, "output_projection": True})

"""Memories whose heads retrieve slots: what they start as, compute with every option, learn first, and refuse."""

import copy
import math

import pytest
import torch
from config.reading import read_entry
from memory.building import acting, read_by, retrieving
from models.upscaled import memory_config, upscaled_model
from tiny import prompt, tiny_model
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from midus_hf.config.declared_tensors import ONES, ZEROS, DeclaredTensor, Normal, Uniform

KEYS, SLOTS = (DeclaredTensor((4, 6, width), "key", Uniform(1 / math.sqrt(width))) for width in (3, 6))
VALUES, SHARED, FEW = (DeclaredTensor(shape, "value", ZEROS) for shape in ((36, 6), (36, 24), (6, 24)))
TRANSFORM = DeclaredTensor((4, 6, 6), "transform", Normal(1 / math.sqrt(6)))
PROJECTION = DeclaredTensor((24, 24), "projection", Normal(1 / math.sqrt(24)))
# With four heads of six features, and six sub-keys or slots.
TENSORS = {
    "midus-hml": {"row_keys": KEYS, "column_keys": KEYS, "value_bank": VALUES, "value_transform": TRANSFORM},
    "midus-pkm": {"query_projection.weight": PROJECTION, "row_keys": KEYS, "column_keys": KEYS, "value_bank": SHARED},
    "midus-linear": {"query_projection.weight": PROJECTION, "slot_keys": SLOTS, "value_bank": FEW},
}
STARTS = {"query_norm_weight": ONES, "query_norm_bias": ZEROS, "query_mean": ZEROS, "query_variance": ONES}
OF_NORM = {
    name: DeclaredTensor((4, 6), "norm" if "norm" in name else "buffer", start) for name, start in STARTS.items()
}


def test_declared_tensors_are_those_of_the_paper(memory_type):
    memory = retrieving(memory_type, query_norm="batch")
    assert memory.declared == {**TENSORS[memory_type], **OF_NORM}
    for name, tensor in memory.declared.items():
        assert memory.declared_tensor(name).any() == (tensor.initial != ZEROS)
    assert memory_type == "midus-linear" or not torch.equal(memory.row_keys, memory.column_keys)
    many = torch.empty(1000)
    Uniform(0.25).fill(many, torch.Generator().manual_seed(0))
    assert -0.25 <= many.min() < -0.24
    assert 0.24 < many.max() <= 0.25


@pytest.mark.parametrize("name", ["midus-pkm", "midus-linear"])
def test_model_initialises_the_query_projection_as_declared(family, name):
    """Transformers' own initialisation of linear layers, with a deviation of 0.02, must not come last."""
    config = memory_config(tiny_model(family, hidden_size=64), memory_type=name, query_norm="batch")
    torch.manual_seed(0)
    memory = AutoModelForCausalLM.from_config(config).model.layers[1].memory
    assert memory.query_projection.weight.std().item() == pytest.approx(1 / 8, rel=0.1)
    assert (memory.query_variance == 1).all()
    assert not memory.value_bank.any()


EPS, MOMENTUM = 1e-5, 0.1
State = dict[str, torch.Tensor]


def normalised(state: State, queries: torch.Tensor, query_norm: str, training: bool) -> torch.Tensor:
    """Return queries `[S, H, w]` after their norm; a batch norm that trains updates the running statistics in `state`."""
    if query_norm == "none":
        return queries
    if query_norm == "layer":
        mean, variance = queries.mean(-1, keepdim=True), queries.var(-1, correction=0, keepdim=True)
    elif training:
        mean, variance = queries.mean(0), queries.var(0, correction=0)
        unbiased = variance * len(queries) / max(len(queries) - 1, 1)
        for name, value in (("query_mean", mean), ("query_variance", unbiased)):
            state[name] = (1 - MOMENTUM) * state[name] + MOMENTUM * value
    else:
        mean, variance = state["query_mean"], state["query_variance"]
    return (queries - mean) / (variance + EPS).sqrt() * state["query_norm_weight"] + state["query_norm_bias"]


@torch.no_grad()
def by_equations(memory: torch.nn.Module, attention_output: torch.Tensor) -> tuple[torch.Tensor, State]:
    """What a memory returns for `[B, T, W]`, and its state dict afterwards, in float64, with the scores of all slots.

    Written from MIDUS, equations 4, 5 and 11 to 17, and the definition of batch normalisation.
    """
    state = {name: tensor.double().clone() for name, tensor in memory.state_dict().items()}
    queries = attention_output.double().flatten(0, 1)
    projects = "query_projection.weight" in state
    queries = queries @ state["query_projection.weight"].T if projects else queries
    queries = normalised(state, queries.unflatten(-1, (memory.num_heads, -1)), memory.query_norm, memory.training)
    if "slot_keys" in state:
        scores = torch.einsum("shw,hnw->shn", queries, state["slot_keys"])
    else:  # slot `i * n + j` pairs sub-keys i and j
        sides = zip(("row_keys", "column_keys"), queries.chunk(2, dim=-1), strict=True)
        rows, columns = (torch.einsum("shw,hnw->shn", half, state[name]) for name, half in sides)
        scores = (rows.unsqueeze(-1) + columns.unsqueeze(-2)).flatten(-2)
    best = scores.topk(memory.k)
    read = (best.values.softmax(-1).unsqueeze(-1) * state["value_bank"][best.indices]).sum(-2)  # [S, H, v]
    # With a projection values have the full width, and heads are summed (equation 15); else heads write shares of it (17).
    output = read.sum(1) if projects else torch.einsum("hij,shj->shi", state["value_transform"], read).flatten(1)
    return output.unflatten(0, attention_output.shape[:2]), state


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("query_norm", ["none", "batch", "layer"])
def test_output_and_statistics_match_the_equations(memory_type, query_norm, training):
    for k in (1, 5):
        memory = retrieving(memory_type, k=k, query_norm=query_norm)
        acting(memory.double().train(training))
        inputs = read_by(memory)
        expected, state = by_equations(memory, inputs)
        memory.retrieve(inputs)  # which changes no statistics
        torch.testing.assert_close(memory(inputs), expected, rtol=1e-10, atol=1e-12)
        for name, tensor in memory.state_dict().items():
            torch.testing.assert_close(tensor, state[name], rtol=1e-10, atol=1e-12, msg=name)
        with torch.no_grad():  # values expanded once for all, where it is inference
            expected, _ = by_equations(memory.eval(), inputs)
            torch.testing.assert_close(memory(inputs), expected, rtol=1e-10, atol=1e-12)


def test_statistics_are_those_of_tokens_that_are_no_padding(memory_type):
    memory, other = (acting(retrieving(memory_type, query_norm="batch").double()).train() for _ in range(2))
    inputs, real = read_by(memory, 2, 6), torch.tensor([[1, 1, 1, 1, 0, 0], [0, 1, 0, 1, 1, 1]], dtype=torch.bool)
    inputs[~real] = 1e3
    output = memory(inputs, real=real)
    torch.testing.assert_close(output[real], other(inputs[real][None])[0], rtol=1e-10, atol=1e-12)
    for name in ("query_mean", "query_variance"):
        torch.testing.assert_close(getattr(memory, name), getattr(other, name), rtol=1e-10, atol=1e-12)
    before = memory.query_mean.clone()
    memory(read_by(memory, 2, 6), real=torch.zeros_like(real))
    assert torch.equal(memory.query_mean, before)


def test_gradients_match_finite_differences(memory_type):
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
    assert output.shape == (batch, tokens, 24)
    assert output.isfinite().all()
    assert torch.equal(before, memory.query_mean) != (training and batch * tokens > 0)


def test_repr_names_options_that_differ_from_defaults():
    assert repr(retrieving("midus-hml")) == "MidusHmlMemory(k=2, n=6)"
    assert "\n  k=2, query_norm=none, n=6\n" in repr(retrieving("midus-pkm"))
    assert "\n  k=2, slots=6\n" in repr(retrieving("midus-linear", query_norm="batch"))


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("midus-linear", {"hidden_size": 26}, "hidden_size is 26; expected a multiple of the 4 attention heads"),
        ("midus-hml", {"head_dim": 15}, "head_dim is 15; expected an even number, half for rows"),
        ("midus-pkm", {"hidden_size": 20}, "hidden_size / num_attention_heads is 5; expected an even number"),
    ],
)
def test_unfit_sizes_are_refused(name, sizes, message):
    with pytest.raises(ValueError, match=message):
        retrieving(name, **sizes)
    assert retrieving("midus-linear", hidden_size=20).query_width == 5  # which is not halved


@pytest.mark.parametrize(
    ("memory_type", "size", "keeps"),
    [
        ("midus-hml", {"n": 64, "query_norm": "none"}, False),
        ("midus-pkm", {"n": 64, "query_norm": "batch"}, True),
        ("midus-linear", {"slots": 4096, "query_norm": "batch"}, True),
    ],
)
def test_defaults_are_those_of_the_paper(memory_type, size, keeps):
    options = read_entry({"type": memory_type, "layers": [1]}).options
    assert {name: getattr(options, name) for name in ("k", *size)} == {"k": 4, **size}
    assert (options.output_projection, options.inner_residual) == (keeps, keeps)
    options = read_entry({"type": memory_type, "layers": [0], "inner_residual": not keeps}).options
    assert options.inner_residual != keeps


def small(memory_type, **options):
    """Build a memory of three heads with queries of six numbers, or four if they are projected, in training mode."""
    width = {"head_dim": 6} if memory_type == "midus-hml" else {}
    return retrieving(memory_type, hidden_size=12, num_heads=3, size=5, **width, **options)


@pytest.mark.parametrize("query_norm", ["batch", "layer"])
def test_query_norm_in_half_precision_is_close(memory_type, query_norm):
    memory = acting(small(memory_type, query_norm=query_norm)).bfloat16()
    query = torch.randn(2, 7, 3, memory.query_width, generator=torch.Generator().manual_seed(2)).bfloat16()
    actual, expected = memory.normalised(query), copy.deepcopy(memory).double().normalised(query.double())
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.double(), expected, rtol=2e-2, atol=2e-2)


def test_batch_norm_with_frozen_gain_keeps_its_statistics(memory_type):
    memory = acting(small(memory_type, query_norm="batch")).eval()
    inputs = read_by(memory)
    expected, before = memory(inputs), copy.deepcopy(memory.state_dict())
    memory.query_norm_weight.requires_grad_(False)
    assert torch.equal(memory.train()(inputs), expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in memory.state_dict().items())
    memory.query_norm_weight.requires_grad_(True)
    assert not torch.allclose(memory(inputs), expected)
    assert not torch.equal(memory.query_mean, before["query_mean"])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_statistics_update_once_under_checkpointing(memory_type, use_reentrant):
    plain, calls = acting(small(memory_type, query_norm="batch")), []
    repeated, inputs = copy.deepcopy(plain), read_by(plain)
    repeated.register_forward_pre_hook(lambda *_: calls.append(1))
    plain(inputs.requires_grad_()).square().sum().backward()
    checkpoint(repeated, inputs.detach().requires_grad_(), use_reentrant=use_reentrant).square().sum().backward()
    assert len(calls) == 2
    assert all(torch.equal(tensor, repeated.state_dict()[name]) for name, tensor in plain.state_dict().items())
    for one, other in zip(plain.parameters(), repeated.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
def test_residual_is_added_and_exact_for_zero_values(memory_type, dtype, tolerance):
    memory = acting(small(memory_type)).to(dtype)
    inputs = read_by(memory)
    stream = torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(3)).to(dtype)
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            actual, expected = memory.eval()(inputs, stream), stream + memory(inputs)
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    with torch.no_grad():
        memory.value_bank.zero_()
        assert torch.equal(memory(inputs, stream), stream)
        assert torch.equal(memory.train()(inputs, stream), stream)


@pytest.mark.parametrize("inner_residual", [False, True])
def test_block_follows_output_projection_and_inner_residual(family, inner_residual):
    """The memory reads the family's own attention, through its projection and norm, and the block's input beside it."""
    options = {"output_projection": True, "inner_residual": inner_residual}
    base, model = tiny_model(family), upscaled_model(family, memory_options=options)
    block, donor, seen = model.model.layers[1], base.model.layers[1], []
    block.memory.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    block.register_forward_pre_hook(lambda *call: seen.append(call[1:]), with_kwargs=True)
    with torch.no_grad():
        model(prompt(), use_cache=False)
        ((hidden_states,), keywords), read = seen
        expected = donor.self_attn(hidden_states=donor.input_layernorm(hidden_states), **keywords)[0]
        if family.startswith("gemma"):
            expected = donor.post_attention_layernorm(expected)
    assert torch.equal(read, hidden_states + expected if inner_residual else expected)


def test_inner_residual_of_unequal_widths_is_refused():
    message = r"width 32 to an attention output of width 64; expected equal widths\. Set output_projection to true"
    with pytest.raises(ValueError, match=message):
        upscaled_model("qwen3", memory_options={"inner_residual": True})
    upscaled_model("qwen3", memory_options={"inner_residual": True, "output_projection": True})

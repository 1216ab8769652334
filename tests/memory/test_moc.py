"""The layer of Mixture of Chapters is what loops over its equations give, forward and backward, for every option."""

import pytest
import torch
from memory.chapter_layers import WIDTH, assert_reads, by_loops, gradients_of, layer, states

from midus_hf.config.declared_tensors import ModelSizes
from midus_hf.memories.moc.options import MocOptions
from midus_hf.memories.module import build_memory

ROUTINGS = ("chunk", "token", "sequence")


def check(memory, hidden_states):
    output, reads = memory(hidden_states), by_loops(memory, hidden_states)
    assert_reads(output, reads)
    expected = torch.stack([reads[key].added for key in sorted(reads)]).view_as(output)
    wanted = [hidden_states, *memory.parameters()]
    torch.testing.assert_close(gradients_of(output, wanted), gradients_of(expected, wanted), rtol=1e-8, atol=1e-9)


OPTIONS = [*({"shared_chapters": number} for number in (0, 2, 6)), {"k": 7}, {"k": 1}, {"chunk_size": 64}]
OPTIONS += [{"routed_scale": 0.5}, {"chapters": 16}, {"chapters": 1, "shared_chapters": 0, "k": 1}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_layer_equals_loops_for_each_option(options):
    check(layer(**options), states())


def test_only_read_chapters_are_projected():
    """A single sequence reads three chapters of eight; three sequences each of theirs once."""
    memory, seen = layer(routing="sequence"), []
    memory.key_projection.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0].shape[0]))
    check(memory, states(batch=1))
    check(memory, states(batch=3))
    routed = memory.route(states(batch=3)).chosen.unique()
    assert seen == [3, 1 + len(routed)]
    assert len(routed) <= 6


def test_shared_bank_is_read_like_an_own_one():
    own, shared = layer(), layer(share="all")
    assert not hasattr(shared, "bank")
    tables = {"bank": own.bank}
    shared.load_state_dict({name: tensor for name, tensor in own.state_dict().items() if name not in tables})
    assert torch.equal(shared(states(), tables=tables), own(states()))


def test_bank_of_the_paper_is_shared_and_not_cached():
    sizes = ModelSizes(hidden_size=768, num_heads=12, head_dim=64)
    options = MocOptions(**MocOptions.presets["paper"])
    (tables,) = options.tables(sizes, (2, 6, 10, 14))
    assert (tables.layers, tables.tensors["bank"].shape) == ((2, 6, 10, 14), (262_208, 768))
    with torch.device("meta"):
        assert build_memory(MocOptions(), sizes).make_decode_cache() is not None
        assert build_memory(options, sizes).make_decode_cache() is None


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_empty_batch_gives_an_empty_output(routing, shape):
    memory = layer(routing=routing)
    hidden_states = torch.zeros(*shape, WIDTH, dtype=torch.float64, requires_grad=True)
    output = memory(hidden_states)
    assert output.shape == (*shape, WIDTH)
    output.sum().backward()


def test_half_precision_routes_in_float32():
    memory = layer().bfloat16()
    hidden_states = states().detach().bfloat16()
    routing = memory.route(hidden_states)
    assert routing.logits.dtype == routing.log_weights.dtype == torch.float32
    wide = memory.double().route(hidden_states.double())
    torch.testing.assert_close(routing.logits.double(), wide.logits, rtol=2e-2, atol=2e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = memory.float().route(hidden_states.float())
    assert within.logits.dtype == torch.float32
    torch.testing.assert_close(within.logits, memory.route(hidden_states.float()).logits)
    narrow = memory.bfloat16()(hidden_states)
    memory.bank.data = memory.bank.data.float()  # a bank of a wider dtype
    assert torch.equal(memory(hidden_states), narrow)
    assert narrow.dtype == torch.bfloat16


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("way", ["bfloat16", "autocast"])
def test_half_precision_is_near_float64(way, routing):
    """By the root mean square of errors; the router decides clearly, so that rounding changes no choice."""
    memory = layer(routing=routing)
    with torch.no_grad():
        memory.router_bias.copy_(torch.arange(8) * 20)
    hidden_states = states().detach()
    expected = memory(hidden_states)
    wanted = gradients_of(expected, list(memory.parameters()))
    if way == "bfloat16":
        output = memory.bfloat16()(hidden_states.bfloat16())
    else:
        memory.float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = memory(hidden_states.float())
    assert output.dtype == torch.bfloat16

    def error(results: torch.Tensor, right: torch.Tensor) -> float:
        return ((results.double() - right).square().mean() / right.square().mean().clamp(min=1e-12)).sqrt().item()

    assert error(output, expected) < 0.03
    gradients = gradients_of(output, list(memory.parameters()))
    for (name, _), gradient, right in zip(memory.named_parameters(), gradients, wanted, strict=True):
        if "router" not in name:  # which hardly moves where it decides clearly
            assert error(gradient, right) < 0.06, name

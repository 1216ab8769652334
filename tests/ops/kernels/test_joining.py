"""Which way heads that read sequence and depth take, and that both ways give the same."""

import pytest
import torch
from ops.kernels.closeness import assert_close
from ops.kernels.conftest import DEVICE

from midus_hf.ops import joining, op_choices
from midus_hf.ops.joining import Depth, joined_attention
from midus_hf.ops.sequence_kernels import Call


def drawn(count, tokens, seed, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, tokens, count, 16, generator=generator).to(DEVICE, dtype).transpose(1, 2).requires_grad_()


def heads(dtype=torch.bfloat16, gated=True, tokens=5, added=False):
    """Four query heads on two, two slots, causal, and a gate of each head."""
    query = drawn(4, tokens, 0, dtype)
    call = Call(query, drawn(2, tokens, 1, dtype), drawn(2, tokens, 2, dtype), None, 0.0, True, 0.25, True)
    keys, values = ([drawn(2, tokens, 10 * part + slot, dtype) for slot in range(2)] for part in (1, 2))
    gate = torch.tensor([0.1, 0.9, 0.0, 0.5], device=DEVICE, requires_grad=True) if gated else None
    return call, Depth(query, keys, values, 0.25, gate=gate, added=added)


def leaves_of(call, depth):
    return [call.query, call.key, call.value, *depth.keys, *depth.values, depth.gate]


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch):
    monkeypatch.setattr(joining, "_FASTER", {})


@pytest.fixture
def taken(monkeypatch):
    """The ways that calls took, in their order."""
    ways = []

    def spied(way, run):
        return lambda *given: (ways.append(way), run(*given))[1]

    monkeypatch.setattr(joining, "_WAYS", {way: spied(way, run) for way, run in joining._WAYS.items()})
    return ways


@pytest.mark.parametrize("added", [False, True], ids=["interpolated", "added"])
def test_both_ways_give_the_same_and_the_same_gradients(added, taken):
    found = {}
    for way in ("merged", "fused"):
        call, depth = heads(added=added)
        with op_choices(backend="triton", depth_path=way):
            output = joined_attention(call, depth)
            along = torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).to(DEVICE, torch.bfloat16)
            found[way] = [output, *torch.autograd.grad(output, leaves_of(call, depth), along)]
    assert taken == ["merged", "fused"]
    for ours, other in zip(found["fused"], found["merged"], strict=True):
        assert ours.dtype == other.dtype
        assert_close("what was read", ours, other, torch.bfloat16)


def test_both_are_merged_unless_asked_otherwise(taken):
    call, depth = heads()
    with op_choices(backend="triton"):
        found = joined_attention(call, depth)
        with op_choices(depth_path="merged"):
            assert torch.equal(found, joined_attention(call, depth))
    assert taken == ["merged"] * 2


def masked(call, depth):
    return call._replace(attn_mask=torch.ones(5, 5, dtype=torch.bool, device=DEVICE).tril(), is_causal=False), depth


DECLINED = {
    "masked": masked,
    "dropped": lambda call, depth: (call._replace(dropout_p=0.5), depth),
    "capped": lambda call, depth: (call, depth._replace(softcap=5.0)),
    "other queries": lambda call, depth: (call, depth._replace(query=call.query * 2)),
    "from a cache": lambda call, depth: (
        call._replace(key=torch.cat([call.key] * 2, 2), value=torch.cat([call.value] * 2, 2), is_causal=False),
        depth,
    ),
}


@pytest.mark.parametrize("chosen", ["fused", "measured"])
@pytest.mark.parametrize("kind", DECLINED)
def test_what_the_kernel_does_not_take_is_merged(kind, chosen, taken):
    call, depth = DECLINED[kind](*heads())
    with op_choices(backend="triton", depth_path=chosen):
        joined_attention(call, depth)
    assert taken == ["merged"]


def test_float32_is_merged_and_so_is_what_ops_compute_by_pytorch(taken):
    with op_choices(backend="triton", depth_path="fused"):
        joined_attention(*heads(torch.float32))
    with op_choices(backend="torch", depth_path="fused"):
        joined_attention(*heads())
    assert taken == ["merged"] * 2


@pytest.mark.parametrize("faster", ["merged", "fused"])
def test_the_faster_way_is_found_once_for_a_shape_and_taken_from_then_on(faster, taken, monkeypatch):
    timed = []

    def milliseconds(way, call, depth):
        timed.append(way)
        # The first run of each, which compiles, does not count, nor does one that was disturbed.
        return 1.0 if (way == faster) == (2 < len(timed) < 11) else 2.0

    monkeypatch.setattr(joining, "_milliseconds", milliseconds)
    with op_choices(backend="triton", depth_path="measured"):
        for _ in range(2):
            joined_attention(*heads())
        assert timed == ["merged", "fused"] * 6 and taken == [faster] * 2
        joined_attention(*heads(tokens=6))
        assert len(timed) == 24
        with torch.no_grad():
            joined_attention(*heads())
        assert len(timed) == 36


@pytest.mark.parametrize("wanted", [True, False])
def test_measuring_changes_no_tensor_and_no_gradient(wanted, taken, monkeypatch):
    monkeypatch.setattr(joining, "_RUNS", 1)
    call, depth = heads()
    before = [leaf.detach().clone() for leaf in leaves_of(call, depth)]
    with op_choices(backend="triton", depth_path="measured"), torch.set_grad_enabled(wanted):
        output = joined_attention(call, depth)
    assert taken[:-1] == ["merged", "fused"] * 2
    assert output.requires_grad == wanted
    with op_choices(backend="triton", depth_path=taken[-1]):
        assert torch.equal(output, joined_attention(call, depth))
    assert all(leaf.grad is None for leaf in leaves_of(call, depth))
    assert all(torch.equal(leaf, old) for leaf, old in zip(leaves_of(call, depth), before, strict=True))


def test_nothing_is_measured_while_a_graph_is_captured(taken, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with op_choices(backend="triton", depth_path="measured"):
        joined_attention(*heads())
    assert taken == ["merged"] and joining._FASTER == {}


@pytest.mark.parametrize("chosen", ["fused", "measured"])
def test_a_compiled_graph_takes_the_kernel_that_is_named_and_measures_nothing(chosen, monkeypatch):
    monkeypatch.setattr(joining, "_milliseconds", lambda *given: pytest.fail("measured"))
    call, depth = heads(gated=False)

    def step(query, key, value, *slots):
        own = call._replace(query=query, key=key, value=value)
        return joined_attention(own, Depth(query, slots[:2], slots[2:], 0.25))

    given = (call.query, call.key, call.value, *depth.keys, *depth.values)
    names = []

    def look(graph, inputs):
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    with op_choices(backend="triton", depth_path=chosen):
        found = torch.compile(step, fullgraph=True, backend=look)(*given)
    torch._dynamo.reset()
    assert any("fused_attention" in name for name in names) == (chosen == "fused")
    with op_choices(backend="triton", depth_path="fused" if chosen == "fused" else "merged"):
        assert_close("what was read", found, step(*given), torch.bfloat16)


def test_another_way_is_refused():
    message = "depth_path is 'both'; expected one of 'auto', 'merged', 'fused', 'measured'"
    with pytest.raises(ValueError, match=message), op_choices(depth_path="both"):
        pass

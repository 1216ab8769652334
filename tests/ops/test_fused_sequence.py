"""Attention to the sequence by torch's own kernel, joined with attention to the depth, against the union of two results."""

import pytest
import torch
import torch.nn.functional as F

from midus_hf.ops.depth.joining import joined
from midus_hf.ops.depth.reference import joint_attention
from midus_hf.ops.depth.sequence_kernels import Call, kernel_of
from midus_hf.ops.depth.sequence_lse import sequence_lse


def drawn(*shape, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def call_of(kind, kv_heads=2, dtype=torch.float64):
    """Four query heads and five tokens; a bool mask, one that is added, or none and causal."""
    query = drawn(2, 4, 5, 8, seed=1, dtype=dtype)
    key, value = (drawn(2, kv_heads, 5, 8, seed=seed, dtype=dtype) for seed in (2, 3))
    read = torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(0)) > 0.4
    read |= torch.eye(5, dtype=torch.bool)
    masks = {"causal": None, "all": None, "bool": read, "added": torch.where(read, 0.0, -3.0).to(dtype)}
    return Call(query, key, value, masks[kind], 0.0, kind == "causal", 0.4, enable_gqa=kv_heads < 4)


def depth_of(dtype=torch.float64):
    """What heads read of the depth, its divisors, and c."""
    gate = torch.rand(2, 4, 5, generator=torch.Generator().manual_seed(7), dtype=torch.float64).requires_grad_()
    lse = drawn(2, 4, 5, seed=5, dtype=torch.promote_types(dtype, torch.float32))
    return drawn(2, 4, 5, 8, seed=4, dtype=dtype), lse, gate


def own(call):
    return F.scaled_dot_product_attention(*call[:6], scale=call.scale, enable_gqa=call.enable_gqa)


@pytest.mark.parametrize("joining", ["added", "interpolated", "joint"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("kind", ["causal", "all", "bool", "added"])
def test_result_and_gradients_are_those_of_two_results_joined(kind, kv_heads, joining):
    call, (depth, depth_lse, gate), added = call_of(kind, kv_heads), depth_of(), joining == "added"
    gate = torch.ones_like(gate).requires_grad_() if joining == "joint" else gate
    kernel = kernel_of(call)
    assert kernel is not None
    got = joined(kernel, call, depth, depth_lse, gate, added)
    lse = sequence_lse(call.query, call.key, call.attn_mask, call.is_causal, call.scaling)
    expected = joint_attention(own(call), lse, depth, depth_lse, gate, added)
    torch.testing.assert_close(got, expected)
    along = drawn(2, 4, 5, 8, seed=9).detach()
    leaves = (call.query, call.key, call.value, depth, depth_lse, gate)
    for ours, other in zip(
        torch.autograd.grad(got, leaves, along), torch.autograd.grad(expected, leaves, along), strict=True
    ):
        torch.testing.assert_close(ours, other)


@pytest.mark.parametrize("kind", ["causal", "bool", "added"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_closed_gate_gives_what_torch_gives(dtype, kind):
    call, (depth, depth_lse, gate) = call_of(kind, dtype=dtype), depth_of(dtype)
    kernel = kernel_of(call)
    assert kernel is not None
    closed = torch.zeros_like(gate)
    assert torch.equal(joined(kernel, call, depth, depth_lse, closed, False), own(call))
    assert torch.equal(joined(kernel, call, torch.zeros_like(depth), depth_lse, closed, True), own(call))
    for added in (False, True):
        assert not torch.equal(joined(kernel, call, depth, depth_lse, gate, added), own(call))


@pytest.mark.parametrize("added", [False, True], ids=["interpolated", "added"])
def test_a_closed_gate_has_a_gradient_and_leaves_that_of_the_sequence_as_it_is(added):
    call, (depth, depth_lse, _) = call_of("causal"), depth_of()
    depth = torch.zeros_like(depth).requires_grad_() if added else depth
    gate = torch.zeros(2, 4, 5, dtype=torch.float64, requires_grad=True)
    kernel = kernel_of(call)
    assert kernel is not None
    joined(kernel, call, depth, depth_lse, gate, added).square().sum().backward()
    alone = call_of("causal")
    output = own(alone)
    output.square().sum().backward()
    assert gate.grad.all() and not depth_lse.grad.any()
    # What is added has all of the output's gradient from the start.
    torch.testing.assert_close(depth.grad, 2 * output.detach() if added else torch.zeros_like(depth))
    for ours, other in zip(call[:3], alone[:3], strict=True):
        torch.testing.assert_close(ours.grad, other.grad)


def test_what_no_kernel_tells_is_left_to_others():
    call = call_of("causal")
    assert kernel_of(call._replace(dropout_p=0.1)) is None
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert kernel_of(call) is None
    elsewhere = call._replace(query=call.query.detach().to("meta"))
    assert kernel_of(elsewhere) is None

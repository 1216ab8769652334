"""Memories whose addressing is random: every slot is read, whatever tokens hold, and nothing goes back to queries."""

import pytest
import torch
from memory.building import RETRIEVING, retrieving
from memory.chapter_layers import layer as chapter_layer

from midus_hf.config.declared_tensors import ModelSizes
from midus_hf.memories.module import build_memory, random_directions, tensor_names
from midus_hf.memories.ultramem_v2.options import UltraMemV2Options

TOKENS = 4000
HIDDEN = 64


def build(memory_type, **options):
    """Build a memory of sixteen slots, of which each head of a token reads one."""
    size = 16 if memory_type == "midus-linear" else 4
    return retrieving(memory_type, hidden_size=HIDDEN, num_heads=2, size=size, k=1, **options)


def build_ultramem(**options):
    sizes = ModelSizes(hidden_size=HIDDEN, num_heads=4, intermediate_size=128, num_layers=2)
    return build_memory(UltraMemV2Options(**options), sizes)


def slots_read(memory_type, addressing):
    """The slots or chapters that tokens read which all hold the same, and how many there are.

    Keys have one length and right angles to each other, so that none is nearer to a random direction than the next.
    """
    if memory_type == "moc":
        memory = chapter_layer(routing="token", shared_chapters=0, k=1, addressing=addressing)
        keys = [memory.router_weight.unsqueeze(0)]
        memory.router_bias.data.zero_()
    elif memory_type == "ultramem-v2":
        memory = build_ultramem(n=4, k=1, rank=2, addressing=addressing, zero="none")
        keys = [key[0, 0].transpose(0, 1) for key in (memory.row_keys, memory.column_keys)]
    else:
        memory = build(memory_type, addressing=addressing)
        keys = [memory.get_parameter(name) for name in tensor_names(memory, "key")]
    with torch.no_grad():
        for key in keys:
            key.copy_(torch.eye(max(key.shape[1:]))[: key.shape[1], : key.shape[2]].expand_as(key))
    width = keys[0].shape[-1] if memory_type == "moc" else HIDDEN
    token = torch.randn(1, 1, width, generator=torch.Generator().manual_seed(1)).to(keys[0].dtype)
    torch.manual_seed(0)
    if memory_type == "moc":
        return memory.route(token.expand(1, TOKENS, width)).chosen, memory.num_chapters
    return memory.eval().retrieve(token.expand(1, TOKENS, width))[1], 16


def chi_square(slots, num_slots):
    """How far counts of slots are from even, over what chance gives: one is what it gives."""
    counts = torch.bincount(slots.flatten(), minlength=num_slots).double()
    expected = slots.numel() / num_slots
    return ((counts - expected).square() / expected).sum().item() / (num_slots - 1)


@pytest.mark.parametrize("memory_type", [*RETRIEVING, "ultramem-v2", "moc"])
def test_random_addressing_reads_all_slots_equally_often(memory_type):
    assert chi_square(*slots_read(memory_type, "random")) < 2
    assert chi_square(*slots_read(memory_type, "content")) > 100


@pytest.mark.parametrize("training", [True, False])
def test_random_addressing_gives_queries_no_gradient(memory_type, training):
    memory = build(memory_type, addressing="random", query_norm="layer").train(training)
    with torch.no_grad():
        memory.value_bank.normal_()
    states = torch.randn(1, 9, HIDDEN, requires_grad=True)
    memory(states).sum().backward()
    assert states.grad is None
    asking = {name for name, parameter in memory.named_parameters() if parameter.grad is None}
    assert asking == {"query_norm_weight", "query_norm_bias"} | (
        {"query_projection.weight"} if memory_type != "midus-hml" else set()
    )


def test_random_addressing_keeps_gradients_of_pre_values():
    memory = build_ultramem(n=4, k=2, addressing="random", zero="none")
    states = torch.randn(1, 9, HIDDEN, requires_grad=True)
    memory(states).sum().backward()
    assert states.grad.any()
    assert memory.query_projection.weight.grad is None
    assert memory.pre_projection.weight.grad.any()


def test_content_addressing_draws_nothing(memory_type):
    memory = build(memory_type)
    before = torch.get_rng_state()
    memory(torch.ones(1, 9, HIDDEN))
    assert torch.equal(torch.get_rng_state(), before)
    assert "addressing" not in memory.extra_repr()
    assert memory_type != "midus-hml" or "addressing=random" in build("midus-hml", addressing="random").extra_repr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_random_directions_keep_lengths(dtype):
    vectors = torch.randn(50, 8, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()
    torch.manual_seed(0)
    drawn = random_directions(vectors)
    assert (drawn.dtype, drawn.shape) == (dtype, vectors.shape)
    assert not drawn.requires_grad
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-6
    lengths = [of.detach().double().norm(dim=-1) for of in (drawn, vectors)]
    torch.testing.assert_close(*lengths, rtol=tolerance, atol=tolerance)
    cosines = torch.cosine_similarity(drawn.double(), vectors.detach().double(), dim=-1)
    assert cosines.mean().abs() < 0.2
    assert cosines.std() > 0.2
    assert torch.equal(random_directions(torch.zeros(3, 4)), torch.zeros(3, 4))

"""Memories whose addressing is random: every slot is read, whatever tokens hold, and nothing goes back to queries."""

import pytest
import torch
from memory.building import retrieving
from memory.chapter_layers import layer as chapter_layer

from midus_hf.config.model_sizes import ModelSizes
from midus_hf.memories.module import build_memory
from midus_hf.memories.retrieval.layer import random_directions
from midus_hf.memories.ultramem.options import UltraMemOptions

TOKENS = 4000
HIDDEN = 64


def build(memory_type, **options):
    """Build a memory of sixteen slots, of which each head of a token reads one."""
    size = 16 if memory_type == "linear" else 4
    return retrieving(memory_type, hidden_size=HIDDEN, num_heads=2, size=size, k=1, **options)


def build_ultramem(**options):
    sizes = ModelSizes(hidden_size=HIDDEN, num_heads=4, intermediate_size=128, num_layers=2)
    return build_memory(UltraMemOptions(**options), sizes)


def even_keys(memory):
    """Keys of one length at right angles to each other, so that no slot is nearer to a random direction than the next."""
    with torch.no_grad():
        for name in memory.names_of("key"):
            key = memory.get_parameter(name)
            key.copy_(torch.eye(key.shape[-1])[: key.shape[-2]].expand_as(key))
    return memory


def same_tokens(tokens=TOKENS, width=HIDDEN):
    """Tokens that all hold the same `[1, T, D]`."""
    return torch.randn(1, 1, width, generator=torch.Generator().manual_seed(1)).expand(1, tokens, width)


def chi_square(slots, num_slots):
    """How far counts of slots are from even, over what chance gives: one is what it gives."""
    counts = torch.bincount(slots.flatten(), minlength=num_slots).double()
    expected = slots.numel() / num_slots
    return ((counts - expected).square() / expected).sum().item() / (num_slots - 1)


def test_every_slot_is_read_about_equally_often_though_tokens_hold_the_same(memory_type):
    memory = even_keys(build(memory_type, addressing="random")).eval()
    torch.manual_seed(0)
    _, slots = memory.retrieve(same_tokens())
    assert chi_square(slots, 16) < 2
    _, by_content = even_keys(build(memory_type)).eval().retrieve(same_tokens())
    assert chi_square(by_content, 16) > 100


def test_every_row_of_a_table_is_read_about_equally_often():
    def made(addressing):
        torch.manual_seed(0)
        memory = build_ultramem(n=4, k=1, rank=2, addressing=addressing, zero="none").eval()
        with torch.no_grad():
            for name in ("row_keys", "column_keys"):
                key = memory.get_parameter(name)  # [H, h, n, r, d]
                key.copy_(torch.eye(key.shape[-1])[:4, None].expand_as(key))
        return memory

    _, slots = made("random").retrieve(same_tokens())
    assert chi_square(slots, 16) < 2
    assert chi_square(made("content").retrieve(same_tokens())[1], 16) > 100


def test_every_chapter_is_opened_about_equally_often():
    def opened(addressing):
        memory = chapter_layer(routing="token", shared_chapters=0, k=1, addressing=addressing)
        with torch.no_grad():
            width, chapters = memory.router_weight.shape[1], memory.num_chapters
            memory.router_weight.copy_(torch.eye(max(width, chapters))[:chapters, :width])
            memory.router_bias.zero_()
        torch.manual_seed(0)
        tokens = same_tokens(width=width).to(memory.router_weight.dtype)
        return memory.route(tokens).chosen, chapters

    assert chi_square(*opened("random")) < 2
    assert chi_square(*opened("content")) > 100


@pytest.mark.parametrize("training", [True, False])
def test_no_gradient_goes_back_to_what_would_be_asked(memory_type, training):
    memory = build(memory_type, addressing="random", query_norm="layer").train(training)
    with torch.no_grad():
        memory.value_bank.normal_()
    states = torch.randn(1, 9, HIDDEN, requires_grad=True)
    memory(states).sum().backward()
    assert states.grad is None
    asking = {name for name, parameter in memory.named_parameters() if parameter.grad is None}
    assert asking == {"query_norm_weight", "query_norm_bias"} | (
        {"query_projection.weight"} if memory_type != "headwise" else set()
    )


def test_what_scales_values_still_has_a_gradient_of_what_tokens_hold():
    memory = build_ultramem(n=4, k=2, addressing="random", zero="none")
    states = torch.randn(1, 9, HIDDEN, requires_grad=True)
    memory(states).sum().backward()
    assert states.grad.any()
    assert memory.query_projection.weight.grad is None and memory.pre_projection.weight.grad.any()


def test_reading_by_content_draws_nothing(memory_type):
    memory = build(memory_type)
    before = torch.get_rng_state()
    memory(torch.ones(1, 9, HIDDEN))
    assert torch.equal(torch.get_rng_state(), before)
    assert "addressing" not in memory.extra_repr()
    assert memory_type != "headwise" or "addressing=random" in build("headwise", addressing="random").extra_repr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_directions_are_as_long_as_what_they_replace(dtype):
    vectors = torch.randn(50, 8, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()
    torch.manual_seed(0)
    drawn = random_directions(vectors)
    assert drawn.dtype == dtype and drawn.shape == vectors.shape and not drawn.requires_grad
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-6
    lengths = [of.detach().double().norm(dim=-1) for of in (drawn, vectors)]
    torch.testing.assert_close(*lengths, rtol=tolerance, atol=tolerance)
    cosines = torch.cosine_similarity(drawn.double(), vectors.detach().double(), dim=-1)
    assert cosines.mean().abs() < 0.2 and cosines.std() > 0.2


def test_where_nothing_is_asked_nothing_is_drawn_beside_zero():
    assert torch.equal(random_directions(torch.zeros(3, 4)), torch.zeros(3, 4))

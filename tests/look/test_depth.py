"""What is recorded of the depth, and the map of a head, are what heads read of it, in one softmax with the sequence."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from models.depth_reference import add_depth
from models.memory_models import depth_model
from tiny import tiny_model
from training.tiny_run import refused

from midus_hf.evaluation.text_rows import TextRows, row_losses
from midus_hf.look.depth import DepthReading, depth_map, depth_rows, depth_table, record_depth
from midus_hf.memories.hosting.heads import SequenceHeads

HEADS = 4


def rows(*lengths: int) -> TextRows:
    """A text of random tokens, a document per row; a model reads so many."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 128, (length + 1,), generator=generator) for length in lengths]
    return TextRows("text", ids, list(range(len(ids))))


def read(model: Any, text: TextRows, batch_size: int = 4) -> list[DepthReading]:
    with record_depth(model) as readings:
        row_losses(model, text, batch_size=batch_size)
    return readings


@pytest.mark.parametrize("kind", ["default", "reused", "joint", "bias", "added to reused", "some"])
@pytest.mark.parametrize(
    ("of_family", "attention"), [("llama", "eager"), ("llama", "sdpa"), ("gemma2", "eager"), ("gemma3", "sdpa")]
)
def test_depth_shares_are_what_values_are_multiplied_with(of_family, kind, attention):
    model, native, text = depth_model(of_family, kind), tiny_model(of_family, torch.float64), rows(12)
    model.set_attn_implementation(attention)
    add_depth(native, model)
    with torch.no_grad():
        native(text.rows[0][None, :-1], use_cache=False)
    readers = [layer.self_attn for layer in native.model.layers if hasattr(layer.self_attn, "slot_shares")]
    for reading, expected in zip(read(model, text), readers, strict=True):
        torch.testing.assert_close(reading.shares, expected.slot_shares.mean((0, 2)))
        torch.testing.assert_close(reading.sequence_shares, expected.sequence_share.mean((0, 2)))
        if attention == "eager":  # which returns weights
            with torch.no_grad():
                weights = model(text.rows[0][None, :-1], output_attentions=True).attentions[reading.layer]
            torch.testing.assert_close(weights.sum(-1), expected.sequence_share, rtol=1e-5, atol=1e-6)


def test_depth_slots_name_the_layer_that_wrote_them():
    def slots_of(kind):
        with record_depth(depth_model(kind=kind)) as readings:
            return {reading.layer: [str(slot) for slot in reading.slots] for reading in readings}

    slots = slots_of("reused")
    assert slots[2] == ["0 attention", "0 ffn", "1 attention", "1 ffn"]
    assert list(slots) == [1, 2, 3]
    assert slots_of("some") == {2: ["0 ffn"], 3: ["0 ffn", "2 ffn"]}


@pytest.mark.parametrize("kind", ["default", "projected"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_depth_readings_ignore_batches_and_padding(attention, kind):
    model, text = depth_model(kind=kind), rows(12, 9, 4)
    model.set_attn_implementation(attention)
    together, alone = (read(model, text, batch_size=size) for size in (3, 1))
    for one, other in zip(together, alone, strict=True):
        assert one.tokens == other.tokens == 25
        torch.testing.assert_close(one.shares, other.shares)


@torch.no_grad()
def test_padding_in_front_is_not_counted():
    model, row = depth_model(), rows(8).rows[0][:-1]
    padded, mask = torch.cat([torch.zeros(4, dtype=torch.long), row])[None], (torch.arange(12) >= 4).long()[None]
    for call, tokens in (
        (lambda: model(padded), 12),
        (lambda: model(padded, attention_mask=mask), 8),
        (lambda: model.model(padded, mask), 8),
    ):
        with record_depth(model) as records:
            call()
        assert {reading.tokens for reading in records} == {tokens}
    for reading, alone in zip(records, read(model, rows(8)), strict=True):
        torch.testing.assert_close(reading.shares, alone.shares)


def test_closed_gate_reads_no_depth_unless_added():
    ones, zeros = torch.ones(HEADS, dtype=torch.float64), torch.zeros(HEADS, dtype=torch.float64)
    for kind, acting, gates, depth, sequence in (
        ("reused", False, zeros, zeros, ones),
        ("default", False, zeros, ones, ones),  # all of it; its values are zero
        ("joint", True, ones, None, None),
    ):
        for reading in read(depth_model(kind=kind, acting=acting), rows(9)):
            depth_shares = reading.shares.sum(1)
            assert torch.equal(reading.gates, gates)
            torch.testing.assert_close(depth_shares, 1 - reading.sequence_shares if depth is None else depth)
            assert sequence is None or reading.sequence_shares.equal(sequence)
            assert depth is not None or depth_shares.min() > 0


def test_depth_table_names_what_is_read_most():
    readings = read(depth_model(kind="reused"), rows(12))
    first, last, rest = readings[0], readings[-1], depth_rows(readings)[0]
    assert rest["shares"] == first.shares.tolist()
    assert rest["slots"][1] == {"layer": 0, "source": "ffn"}
    table, of_heads, of_slots = depth_table(readings), first.shares.sum(1), last.shares.mean(0)
    assert table.rows[0][2] == f"{of_heads.max():.1%} ({int(of_heads.argmax())})"
    assert table.rows[-1][-1].startswith(f"{last.slots[int(of_slots.argmax())]} {of_slots.max():.1%}, ")
    closed = read(depth_model(kind="reused", acting=False), rows(9))
    assert depth_table(closed).rows[0][-2:] == ["0 to 0", "nothing"]


@pytest.mark.parametrize("kind", ["default", "reused", "projected"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_head_map_agrees_with_recorded_shares(attention, kind):
    model, text = depth_model(kind=kind), rows(9)
    model.set_attn_implementation(attention)
    *_, reading = read(model, text)
    for head in range(HEADS):
        result = depth_map(model, text.rows[0][:-1], 3, head)
        assert (result.sequence.shape, result.depth.shape) == ((9, 9), (9, len(result.slots)))
        total = 1.0 if kind == "reused" else 2 - reading.gates[head].item()
        both = result.sequence.sum(1) + result.depth.sum(1)
        torch.testing.assert_close(both, torch.full((9,), total, dtype=torch.float64))
        assert result.sequence.sum(1).mean().item() == pytest.approx(reading.sequence_shares[head].item())
        assert not result.sequence.triu(1).any()
        assert result.depth.sum(1).mean().item() == pytest.approx(reading.shares[head].sum().item())
        assert result.depth[:, -1].mean().item() == pytest.approx(reading.shares[head, -1].item())


def test_map_without_depth_is_the_models_attention():
    model, row = depth_model(kind="reused", acting=False), rows(9).rows[0]
    model.set_attn_implementation("eager")
    weights = model(row[None], output_attentions=True).attentions
    hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.train().modules()]
    for head in range(HEADS):
        result = depth_map(model, row, 2, head)
        torch.testing.assert_close(result.sequence, weights[2][0, head].detach())
        assert not result.depth.any()
        assert model.training
    assert [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()] == hooks


@pytest.mark.parametrize(("implementation", "caps"), [("eager", True), ("sdpa", False)])
def test_scores_are_capped_where_attention_caps_them(implementation, caps):
    query, key = torch.randn(2, 1, 1, 3, 4, dtype=torch.float64)
    arguments = {"scaling": 8.0, "softcap": 0.5, "is_causal": False}
    attention = SequenceHeads(None, lambda *_: None, implementation, query, key, key, None, arguments)
    scores = 8.0 * query @ key.mT
    if caps:
        scores = 0.5 * torch.tanh(scores / 0.5)
    torch.testing.assert_close(attention.log_sum(), scores.logsumexp(-1))
    torch.testing.assert_close(attention.shares(0), scores.softmax(-1)[:, 0])


def test_unreadable_attention_is_refused():
    query, divisor = torch.zeros(1, 2, 3, 4), torch.ones(1, 2, 3)
    attention = SequenceHeads(None, lambda *_: (None, divisor), "flex_attention", query, None, None, None, {})
    assert torch.equal(attention.log_sum(), divisor)
    with refused("attention 'flex_attention' has masks that do not say what each query reads"):
        attention.shares(0)
    with refused(r"attention 'flash_attention_2' on cpu exposes no log-sum-exp"):
        replace(attention, implementation="flash_attention_2").log_sum()

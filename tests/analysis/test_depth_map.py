"""The map of a head says what it multiplies values of the sequence and of slots with."""

import pytest
import torch
from analysis.read_depth import read, rows
from models.depth_models import depth_model

from midus_hf.analysis.depth.map import depth_map
from midus_hf.memory.sequence_heads import SequenceHeads


@pytest.mark.parametrize("kind", ["default", "reused", "last"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_shares_of_a_token_are_those_that_are_recorded_and_add_up(attention, kind):
    model, text = depth_model(kind=kind), rows(9)
    model.set_attn_implementation(attention)
    *_, reading = read(model, text)
    for head in range(4):
        found = depth_map(model, text.rows[0], 3, head)
        assert found.sequence.shape == (9, 9) and found.depth.shape == (9, len(found.slots))
        total = 1.0 if kind == "reused" else 2 - reading.gates[head]
        both = found.sequence.sum(1) + found.depth.sum(1)
        torch.testing.assert_close(both, torch.full((9,), total, dtype=torch.float64))
        assert found.sequence.sum(1).mean().item() == pytest.approx(reading.sequence_shares[head])
        assert not found.sequence.triu(1).any()
        assert found.depth.sum(1).mean().item() == pytest.approx(reading.depth_shares[head])
        assert found.depth[:, -1].mean().item() == pytest.approx(reading.shares[head][-1])


def test_without_the_depth_it_is_the_attention_of_the_model():
    model, (row,) = depth_model(kind="reused", acting=False), rows(9).rows
    model.set_attn_implementation("eager")
    weights = model(row[None], output_attentions=True).attentions
    for head in range(4):
        found = depth_map(model, row, 2, head)
        torch.testing.assert_close(found.sequence, weights[2][0, head].detach())
        assert not found.depth.any()


def test_the_model_stays_as_it_was():
    model = depth_model().train()
    depth_map(model, rows(9).rows[0], 1, 0)
    assert model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_attention_whose_masks_do_not_tell_is_refused():
    heads = SequenceHeads(None, None, "flex_attention", *[None] * 4, {})
    with pytest.raises(
        ValueError, match=r"attention 'flex_attention' has masks that do not say what each query reads; exp"
    ):
        heads.shares(0)


def test_the_divisor_of_the_softmax_is_what_flex_attention_tells_and_nobody_else():
    query, told = torch.zeros(1, 2, 3, 4), torch.ones(1, 2, 3)
    flex = SequenceHeads(None, lambda *given: (None, told), "flex_attention", query, None, None, None, {})
    assert torch.equal(flex.log_sum(), told)
    flash = SequenceHeads(None, lambda *given: (None, told), "flash_attention_2", query, None, None, None, {})
    with pytest.raises(
        ValueError, match=r"attention 'flash_attention_2' on cpu does not tell by what its softmax divides"
    ):
        flash.log_sum()

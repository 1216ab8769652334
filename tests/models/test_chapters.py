"""Layers that share a bank of chapters: its gradient, a stand-in for it, and what masks tell its routers."""

import pytest
import torch
from models.chapter_models import chapter_model, memories_of
from models.gradients import enable_checkpointing
from models.hosting import logits
from tiny import prompt

from midus_hf.memories.decode_cache import decode_cache

BANK = "model.memory_tables.chapters.0.bank"


def gradients(sparse: bool = False, checkpointing: bool = False, **options) -> dict[str, torch.Tensor]:
    """Gradients of the memories of four layers, after two passes of few tokens."""
    model = chapter_model(layers=(0, 1, 2, 3), memory_tokens=192, chapters=96, **options).train()
    if checkpointing:
        enable_checkpointing(model, use_reentrant=False)
    for memory in memories_of(model):
        memory.sparse_gradient = sparse
    for seed in (1, 2):
        tokens = prompt(9, seed=seed)
        model(tokens, labels=tokens, use_cache=False).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("options", [{}, {"routing": "sequence"}, {"share": "every:2"}, {"share": "none"}], ids=str)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_of_rows_are_those_of_the_whole_bank(options, checkpointing):
    expected = gradients(**options)
    rows = gradients(sparse=True, checkpointing=checkpointing, **options)
    assert expected.keys() == rows.keys()
    for name, gradient in expected.items():
        assert rows[name].is_sparse == name.endswith(".bank")
        torch.testing.assert_close(rows[name].to_dense() if rows[name].is_sparse else rows[name], gradient)
    read, table = next((rows[name], gradient) for name, gradient in expected.items() if name.endswith(".bank"))
    assert 0 < read.coalesce().indices().shape[1] < len(table) / 2


def test_what_is_kept_serves_no_stand_in_for_a_shared_bank_and_no_later_one():
    model = chapter_model()
    changed = model.get_parameter(BANK).detach() + 1
    with torch.no_grad(), decode_cache(model):
        before = logits(model, prompt(7))
        shifted = torch.func.functional_call(model, {BANK: changed}, (prompt(7),)).logits
    assert not torch.allclose(shifted, before, atol=1e-4)
    model.model.memory_tables["chapters"]["0"].bank = torch.nn.Parameter(changed)
    torch.testing.assert_close(logits(model, prompt(7)), shifted)
    with decode_cache(model):
        torch.testing.assert_close(logits(model, prompt(7)), shifted)


@pytest.mark.parametrize("routing", ["chunk", "sequence"])
def test_masks_of_pairs_of_tokens_tell_padding_and_documents(routing):
    """As a collator makes them that packs documents, and as transformers makes them for a padded batch."""
    model, tokens = chapter_model(routing=routing), prompt(8)[:1]
    apart = torch.cat([logits(model, tokens[:, :3]), logits(model, tokens[:, 3:])], dim=1)
    blocks = torch.block_diag(torch.ones(3, 3), torch.ones(5, 5)).tril().bool()[None, None]
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    torch.testing.assert_close(logits(model, tokens, attention_mask=blocks, position_ids=positions), apart)

    padded = torch.cat([torch.zeros_like(tokens[:, :2]), tokens], dim=1)
    seen = torch.ones(10, 10).tril().bool()
    seen[:, :2] = False
    of_padding = torch.zeros(1, 1, 10, 10, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    positions = (torch.arange(10)[None] - 2).clamp(min=0)
    shifted = logits(model, padded, attention_mask=of_padding, position_ids=positions)
    torch.testing.assert_close(shifted[:, 2:], logits(model, tokens))

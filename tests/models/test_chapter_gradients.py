"""Layers that share a bank of chapters give it one gradient: dense by default, of the rows that were read where that is asked for."""

import pytest
import torch
from models.chapter_models import chapter_model, memories_of
from models.gradients import enable_checkpointing
from tiny import prompt

from midus_hf.memory import tables
from midus_hf.memory.chapters import Chapters

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


@pytest.mark.parametrize("options", [{}, {"routing": "sequence"}, {"bank_rank": 5}, {"share": "every:2"}], ids=str)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_indexing(options, checkpointing, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(Chapters, "_gives_rows", lambda *_: False)
        expected = gradients(**options)
    made = []
    original = tables.with_one_gradient
    monkeypatch.setattr(tables, "with_one_gradient", lambda bank: made.append(bank) or original(bank))
    dense = gradients(checkpointing=checkpointing, **options)
    banks = 2 if options.get("share") else 1
    assert len(made) == 2 * banks, "one for each bank and pass, however many layers read it"
    rows = gradients(sparse=True, checkpointing=checkpointing, **options)
    assert expected.keys() == dense.keys() == rows.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(dense[name], gradient)
        assert rows[name].is_sparse == name.endswith(".bank")
        torch.testing.assert_close(rows[name].to_dense() if rows[name].is_sparse else rows[name], gradient)
    read = rows[BANK].coalesce().indices().shape[1]
    assert 0 < read < len(expected[BANK]) / 2


def test_a_layer_that_has_its_own_bank_gives_rows_where_that_is_asked_for():
    dense, rows = gradients(share="none"), gradients(sparse=True, share="none")
    for name, gradient in dense.items():
        assert rows[name].is_sparse == name.endswith(".bank")
        torch.testing.assert_close(rows[name].to_dense() if rows[name].is_sparse else rows[name], gradient)

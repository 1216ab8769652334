"""Layers that share a bank of chapters: its gradient, and what one 'generate' call keeps of it."""

import copy

import pytest
import torch
from models.chapter_models import chapter_model, memories_of
from models.generated_logits import CLOSE, generated, passed
from models.gradients import enable_checkpointing
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


SHARES = {"shared": {}, "own": {"share": "none"}, "neighbours": {"share": "every:1"}}


def through_data(model):
    model.get_parameter(BANK).data.add_(1)


def another_bank(model):
    tables = model.model.memory_tables["chapters"]["0"]
    tables.bank = torch.nn.Parameter(tables.bank + 1)


# In place and by another tensor: whatever writes into parameters does one or the other.
@pytest.mark.parametrize("change", (through_data, another_bank), ids=lambda change: change.__name__)
def test_generate_follows_a_bank_that_changed_since_the_last_call(change):
    model = chapter_model()
    before = generated(model)
    torch.testing.assert_close(before[:, 0], passed(model), **CLOSE)
    with torch.no_grad():
        change(model)
    after = generated(model)
    assert not torch.allclose(after[:, 0], before[:, 0], atol=1e-4), "the change changed nothing"
    torch.testing.assert_close(after[:, 0], passed(model), **CLOSE)
    torch.testing.assert_close(after, generated(copy.deepcopy(model)), **CLOSE)


@pytest.mark.parametrize("share", SHARES)
def test_what_is_kept_is_read_and_nothing_is_projected_again(share, native_family):
    model, seen = chapter_model(native_family, **SHARES[share]), []
    for memory in memories_of(model):
        memory.register_forward_pre_hook(lambda module, _: seen.append(not module.decode_cache.is_empty))
        memory.key_projection.register_forward_pre_hook(lambda *_: seen.append(None))
    logits = generated(model)
    assert seen == [True] * 6
    torch.testing.assert_close(logits[:, 0], passed(model), **CLOSE)


def test_it_serves_no_stand_in_for_a_shared_bank():
    model = chapter_model()
    with torch.no_grad(), decode_cache(model):
        stand_in = {BANK: model.get_parameter(BANK) + 1}
        shifted = torch.func.functional_call(model, stand_in, (prompt(7),)).logits
    with torch.no_grad():
        model.get_parameter(BANK).add_(1)
        torch.testing.assert_close(shifted, model(prompt(7)).logits, **CLOSE)


@pytest.mark.parametrize("options", SHARES.values(), ids=SHARES)
def test_half_precision_keeps_half_precision(options):
    model = chapter_model(dtype=torch.bfloat16, **options)
    with torch.no_grad(), decode_cache(model):
        kept = model(prompt(7)).logits
    with torch.no_grad():
        expected = model.double()(prompt(7)).logits
    assert (kept.double() - expected).square().mean().sqrt() < 0.05 * expected.square().mean().sqrt()


def test_it_is_not_saved(tmp_path):
    model = chapter_model()
    names = set(model.state_dict())
    with torch.no_grad(), decode_cache(model):
        model.save_pretrained(tmp_path)
        assert names == set(model.state_dict()) and not any("kept" in name for name in names)
        assert all(memory.decode_cache.is_empty for memory in memories_of(copy.deepcopy(model)))

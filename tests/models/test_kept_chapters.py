"""Projected chapters are kept for the length of one `generate` call, and never outlive the weights that they come from."""

import copy
from collections.abc import Callable

import pytest
import torch
from models.chapter_models import act, chapter_model, memories_of
from models.generated_logits import CLOSE, generated, passed
from tiny import prompt
from transformers import PreTrainedModel

from midus_hf.memory.kept_values import kept_values

SHARES = {"shared": {}, "own": {"share": "none"}, "factors": {"bank_rank": 5}, "neighbours": {"share": "every:1"}}


def bank_of(model: PreTrainedModel) -> torch.nn.Parameter:
    (bank,) = (parameter for name, parameter in model.named_parameters() if name.endswith(".0.bank"))
    return bank


def in_place(model):
    bank_of(model).add_(2)


def through_data(model):
    bank_of(model).data.add_(1)


def other_data(model):
    bank_of(model).data = bank_of(model).data + 1


def key_projection(model):
    memories_of(model)[0].key_projection.weight.mul_(3)


def value_projection(model):
    memories_of(model)[1].value_projection.weight.data.mul_(3)


def another_parameter(model):
    memory = memories_of(model)[0]
    memory.value_projection.weight = torch.nn.Parameter(memory.value_projection.weight * 2)


def another_bank(model):
    tables = model.model.memory_tables["chapters"]["0"]
    tables.bank = torch.nn.Parameter(tables.bank + 1)


def a_loaded_state(model):
    other = copy.deepcopy(model)
    act(other, seed=12)
    model.load_state_dict(other.state_dict())


def an_assigned_state(model):
    other = copy.deepcopy(model)
    act(other, seed=12)
    model.load_state_dict(other.state_dict(), assign=True)


def an_optimizer(model):
    with torch.enable_grad():
        model(prompt(7), labels=prompt(7)).loss.backward()
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()


CHANGES: tuple[Callable, ...] = (
    in_place,
    through_data,
    other_data,
    key_projection,
    value_projection,
    another_parameter,
    another_bank,
    a_loaded_state,
    an_assigned_state,
    an_optimizer,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_generate_follows_weights_that_changed_since_the_last_call(change):
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
def test_generate_keeps_them_for_the_length_of_one_call(share, native_family):
    model, seen = chapter_model(native_family, **SHARES[share]), []
    for memory in memories_of(model):
        memory.register_forward_pre_hook(lambda module, _: seen.append(not module.kept.is_empty))
        memory.key_projection.register_forward_pre_hook(lambda *_: seen.append(None))
    logits = generated(model)
    assert seen == [True] * 6, "what is kept is read, and nothing is projected again"
    assert all(memory.kept.is_empty for memory in memories_of(model))
    torch.testing.assert_close(logits[:, 0], passed(model), **CLOSE)


def test_what_is_read_is_what_was_kept():
    """So that the other tests compare passes that differ."""
    model = chapter_model()
    with torch.no_grad(), kept_values(model):
        before = model(prompt(7)).logits
        memory = memories_of(model)[0]
        assert memory.kept.num_bytes == 2 * 24 * 32 * 8
        memory.kept._derived.mul_(2)
        assert not torch.allclose(model(prompt(7)).logits, before, atol=1e-4)


def test_it_serves_no_pass_with_gradients_and_no_stand_in():
    model = chapter_model(share="none")
    with kept_values(model):
        model(prompt(7), labels=prompt(7)).loss.backward()
        assert all(memory.bank.grad.any() for memory in memories_of(model))
        with torch.no_grad():
            name = "model.layers.1.memories.chapters.bank"
            stand_in = {name: model.get_parameter(name) + 1}
            shifted = torch.func.functional_call(model, stand_in, (prompt(7),)).logits
    with torch.no_grad():
        model.get_parameter(name).add_(1)
        torch.testing.assert_close(shifted, model(prompt(7)).logits, **CLOSE)


@pytest.mark.parametrize("options", SHARES.values(), ids=SHARES)
def test_half_precision_keeps_half_precision(options):
    model = chapter_model(dtype=torch.bfloat16, **options)
    with torch.no_grad(), kept_values(model):
        assert all(memory.kept._derived.dtype == torch.bfloat16 for memory in memories_of(model))
        kept = model(prompt(7)).logits
    with torch.no_grad():
        expected = model.double()(prompt(7)).logits
    assert (kept.double() - expected).square().mean().sqrt() < 0.05 * expected.square().mean().sqrt()


def test_it_is_not_saved(tmp_path):
    model = chapter_model()
    with torch.no_grad(), kept_values(model):
        names = set(model.state_dict())
        model.save_pretrained(tmp_path)
        assert all(memory.kept.is_empty for memory in memories_of(copy.deepcopy(model)))
    assert names == set(model.state_dict()) and not any("kept" in name for name in names)

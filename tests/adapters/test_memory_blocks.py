"""PEFT's adapters on models with inserted memory blocks."""

import pytest
import torch
from adapters.adapted_models import (
    ATTENTION,
    LINEAR,
    adapted_model,
    adapted_projections,
    assert_checkpointing_changes_no_gradient,
    assert_saved_and_merged,
    logits,
)
from models.optimizer_steps import train_steps
from models.upscaled import upscaled_model
from peft import PeftModel


@pytest.mark.parametrize(
    ("targets", "of_layer"),
    [("all-linear", LINEAR), (sorted(ATTENTION), ATTENTION), (["q_proj", "v_proj"], {"q_proj", "v_proj"})],
    ids=["all-linear", "attention", "queries-and-values"],
)
def test_adapters_land_on_the_projections_that_exist(family, targets, of_layer):
    """A block has those of attention but for the last."""
    model = adapted_model(upscaled_model(family), targets)
    of_block = of_layer & ATTENTION - {"o_proj"}
    for layer in range(6):
        assert adapted_projections(model, layer) == (of_block if layer in (1, 4) else of_layer)


def test_a_new_adapter_changes_nothing(family):
    assert torch.equal(logits(adapted_model(upscaled_model(family))), logits(upscaled_model(family)))


@pytest.mark.parametrize("targets", ["all-linear", sorted(ATTENTION)], ids=["all-linear", "attention"])
def test_a_trained_adapter_survives_saving_and_merging(family, targets, tmp_path):
    model = adapted_model(upscaled_model(family), targets, lora_alpha=16)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    untrained = logits(model)
    train_steps(model, 2)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != ("lora_" in name), name
    assert not torch.allclose(logits(model), untrained, atol=1e-3)
    assert_saved_and_merged(model, lambda: upscaled_model(family), tmp_path)


def test_memories_train_whole_beside_adapters(family, tmp_path):
    model = adapted_model(upscaled_model(family), ["q_proj", "v_proj"], modules_to_save=["memory"])
    before = {name: parameter.clone() for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert sum(name.endswith(".memory.modules_to_save.default.value_bank") for name in before) == 2
    train_steps(model, 2)
    assert all(not torch.equal(model.get_parameter(name), value) for name, value in before.items())
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(upscaled_model(family), tmp_path)), logits(model))


@pytest.mark.parametrize("memory_type", ["product-key", "linear"])
@pytest.mark.parametrize("whole", [None, ["memory"]], ids=["frozen", "whole"])
def test_a_memory_with_batch_norm_is_after_saving_what_it_was(memory_type, whole, tmp_path):
    """Frozen, its statistics stand still; trained whole, they are saved with it."""
    model, again = (upscaled_model("llama", memory_type=memory_type) for _ in range(2))
    model = adapted_model(model, ["q_proj", "v_proj"], modules_to_save=whole)
    train_steps(model, 2)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(again, tmp_path)), logits(model))


def test_adapters_train_the_same_under_activation_checkpointing(family):
    assert_checkpointing_changes_no_gradient(lambda: adapted_model(upscaled_model(family)))

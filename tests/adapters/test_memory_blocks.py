"""PEFT's adapters on models with inserted memory blocks."""

import pytest
import torch
from adapters.adapted_models import (
    ATTENTION,
    LINEAR,
    adapted_model,
    adapted_projections,
    assert_saved_and_merged,
    logits,
)
from models.optimizer_steps import train_steps
from models.upscaled import upscaled_model
from pairs import by_default
from peft import PeftModel
from tiny import FAMILIES


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


@pytest.mark.parametrize("family", by_default(["llama", "gemma3"], FAMILIES))
def test_a_new_adapter_changes_nothing_and_a_trained_one_survives_saving_and_merging(family, tmp_path):
    model = adapted_model(upscaled_model(family), lora_alpha=16)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    untrained = logits(model)
    assert torch.equal(untrained, logits(upscaled_model(family)))
    train_steps(model, 2)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != ("lora_" in name), name
    assert not torch.allclose(logits(model), untrained, atol=1e-3)
    assert_saved_and_merged(model, lambda: upscaled_model(family), tmp_path)


@pytest.mark.parametrize("memory_type", ["product-key", "linear"])
@pytest.mark.parametrize("whole", [None, ["memory"]], ids=["frozen", "whole"])
def test_a_memory_with_batch_norm_is_after_saving_what_it_was(memory_type, whole, tmp_path):
    """Frozen, its statistics stand still; trained whole, they are saved with it."""
    model, again = (upscaled_model("llama", memory_type=memory_type) for _ in range(2))
    model = adapted_model(model, ["q_proj", "v_proj"], modules_to_save=whole)
    train_steps(model, 2)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(again, tmp_path)), logits(model))

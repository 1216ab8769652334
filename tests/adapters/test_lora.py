"""LoRA on models with inserted memories: the config that is offered for them, and those of PEFT."""

import re

import pytest
import torch
from adapters.adapted_models import adapted_model, logits
from models.optimizer_steps import train_steps
from models.upscaled import upscaled_model
from peft import PeftModel, get_peft_model
from tiny import tiny_model
from training.tiny_run import refused

from midus_hf.look.usage import record_usage
from midus_hf.training.adapters import lora_config
from midus_hf.training.optim.freezing import set_trainable
from midus_hf.training.optim.parameter_groups import parameter_groups
from midus_hf.training.optim.rates import Rates

NEW_LAYERS = [1, 4]


def fresh_model():
    """A model whose memories hold zeros and whose config says what is new, as `upscale` makes them."""
    model = upscaled_model("llama", acting=False)
    model.config.upscale = {"new_layers": NEW_LAYERS, "trainable": "new"}
    return model


def test_keys_and_values_have_their_group_beside_adapters():
    model = fresh_model()
    model = get_peft_model(model, lora_config(model, r=4))
    groups = {group["name"]: group for group in parameter_groups(model, Rates(learning_rate=1e-3, weight_decay=0.1))}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, group in (("row_keys", "keys"), ("column_keys", "keys"), ("value_bank", "values")):
        held = [names[id(p)] for p in groups[group]["params"] if names[id(p)].endswith(name)]
        assert [re.sub(r"\D*(\d+).*", r"\1", parameter) for parameter in held] == ["1", "4"]
    assert all(parameter.requires_grad for group in groups.values() for parameter in group["params"])
    assert any("lora_A" in names[id(parameter)] for parameter in groups["decay"]["params"])


def test_slots_are_counted_of_the_layers_that_train():
    model = upscaled_model("llama")
    model.config.upscale = {"new_layers": NEW_LAYERS}
    with record_usage(model) as plain:
        logits(model)
    wrapped = get_peft_model(model, lora_config(model))
    with record_usage(wrapped) as usage:
        logits(wrapped)
    assert list(usage) == list(map(str, NEW_LAYERS))
    assert all(torch.equal(counts, plain[layer]) and counts.any() for layer, counts in usage.items())


def test_options_of_the_offered_config_are_those_of_peft():
    model = fresh_model()
    config = lora_config(model, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj"], modules_to_save=["lm_head"])
    assert (config.r, config.lora_alpha, config.lora_dropout) == (16, 8, 0.1)
    assert config.modules_to_save == ["model.layers.1", "model.layers.4", "lm_head"]
    wrapped = get_peft_model(model, config)
    adapted = {name for name, _ in wrapped.named_modules() if name.endswith(".lora_A.default")}
    expected = {f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_A.default" for layer in (0, 2, 3, 5)}
    assert adapted == expected, "none on the new layers"


def test_new_layers_of_a_dense_method_train_whole_too():
    model = tiny_model("mistral")
    model.config.upscale = {"new_layers": [2], "trainable": "new"}
    wrapped = get_peft_model(model, lora_config(model, r=2))
    trains = {name for name, parameter in wrapped.named_parameters() if parameter.requires_grad}
    assert {name for name in trains if "lora_" not in name} == {
        name for name, _ in wrapped.named_parameters() if "layers.2.modules_to_save." in name
    }


def test_a_model_that_was_not_upscaled_or_is_wrapped_already_is_refused():
    with refused(r"this llama model records no new layers in upscale.new_layers, which would"):
        lora_config(tiny_model("llama"))
    model = fresh_model()
    wrapped = get_peft_model(model, lora_config(model))
    with refused(r"the model is wrapped by PEFT already; expected the model that from_pretrained returns"):
        lora_config(wrapped)
    with refused(r"this midus_llama model is wrapped by PEFT, which has set what trains"):
        set_trainable(wrapped)


@pytest.mark.parametrize("memory_type", ["product-key", "linear"])
@pytest.mark.parametrize("whole", [None, ["memory"]], ids=["frozen", "whole"])
def test_a_memory_with_batch_norm_is_after_saving_what_it_was(memory_type, whole, tmp_path):
    """Frozen, its statistics stand still; trained whole, they are saved with it."""
    model, again = (upscaled_model("llama", memory_type=memory_type) for _ in range(2))
    model = adapted_model(model, ["q_proj", "v_proj"], modules_to_save=whole)
    train_steps(model, 2)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(again, tmp_path)), logits(model))

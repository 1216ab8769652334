"""LoRA on models with inserted memories: the config that is offered for them, and those of PEFT."""

import pytest
import torch
from adapters.adapted_models import adapted_model, logits
from models.gradients import train_steps
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


def test_the_offered_config_has_options_of_peft_and_trains_new_layers_whole_with_their_groups():
    for model, new in ((fresh_model(), NEW_LAYERS), (tiny_model("mistral"), [2])):  # which is of a dense method
        model.config.upscale = {"new_layers": new, "trainable": "new"}
        config = lora_config(
            model, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj"], modules_to_save=["lm_head"]
        )
        assert (config.r, config.lora_alpha, config.lora_dropout) == (16, 8, 0.1)
        assert config.modules_to_save == [*(f"model.layers.{layer}" for layer in new), "lm_head"]
        wrapped = get_peft_model(model, config)
        names = {id(parameter): name for name, parameter in wrapped.named_parameters() if parameter.requires_grad}
        layers = range(model.config.num_hidden_layers)
        prefix = "base_model.model.model.layers"
        assert {name for name in names.values() if "lora_A" in name} == {
            f"{prefix}.{layer}.self_attn.q_proj.lora_A.default.weight" for layer in layers if layer not in new
        }
        whole = tuple(f"{prefix}.{layer}.modules_to_save." for layer in new)
        assert {name for name in names.values() if "lora_" not in name and "lm_head" not in name} == {
            name for name, _ in wrapped.named_parameters() if name.startswith(whole)
        }
        groups = parameter_groups(wrapped, Rates(learning_rate=1e-3, weight_decay=0.1))
        kinds = {group["name"]: [names[id(parameter)] for parameter in group["params"]] for group in groups}
        assert any("lora_A" in name for name in kinds["decay"])
        for kind, of_memory in (("keys", ("row_keys", "column_keys")), ("values", ("value_bank",))):
            assert len(kinds.get(kind, [])) == (len(new) * len(of_memory) if new == NEW_LAYERS else 0)
            assert all(name.endswith(of_memory) for name in kinds.get(kind, []))


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


def test_a_model_that_was_not_upscaled_or_is_wrapped_already_is_refused():
    with refused(r"this llama model records no new layers in upscale.new_layers, which would"):
        lora_config(tiny_model("llama"))
    model = fresh_model()
    wrapped = get_peft_model(model, lora_config(model))
    with refused(r"the model is wrapped by PEFT already; expected the model that from_pretrained returns"):
        lora_config(wrapped)
    with refused(r"this midus_llama model is wrapped by PEFT, which has set what trains"):
        set_trainable(wrapped)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]], ids=str)
def test_adapters_land_on_the_projections_that_exist(family, targets):
    """A block has those of attention but for the last."""
    model = adapted_model(upscaled_model(family), targets)
    of_block = {"q_proj", "k_proj", "v_proj"}
    every = {*of_block, "o_proj", "gate_proj", "up_proj", "down_proj"} if targets == "all-linear" else {*targets}
    adapted = [name.split(".") for name, _ in model.named_modules() if name.endswith(".lora_A.default")]
    for layer in range(6):
        expected = every & of_block if layer in NEW_LAYERS else every
        assert {parts[-3] for parts in adapted if f"layers.{layer}." in ".".join(parts)} == expected


@pytest.mark.parametrize("memory_type", ["product-key", "linear"])
@pytest.mark.parametrize("whole", [None, ["memory"]], ids=["frozen", "whole"])
def test_a_memory_with_batch_norm_is_after_saving_what_it_was(memory_type, whole, tmp_path):
    """Frozen, its statistics stand still; trained whole, they are saved with it."""
    model, again = (upscaled_model("llama", memory_type=memory_type) for _ in range(2))
    model = adapted_model(model, ["q_proj", "v_proj"], modules_to_save=whole)
    train_steps(model, 2)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(again, tmp_path)), logits(model))

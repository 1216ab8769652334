"""LoRA on an upscaled model: the config that is offered for it, and the warning where another leaves memories dead."""

import itertools
import re
import warnings

import pytest
import torch
from adapters.adapted_models import (
    LINEAR,
    adapted_projections,
    assert_checkpointing_changes_no_gradient,
    assert_saved_and_merged,
    logits,
)
from models.optimizer_steps import train_steps
from models.upscaled import SIZES, upscaled_model
from pairs import by_default
from peft import get_peft_model
from tiny import FAMILIES, tiny_model
from training.tiny_run import refused
from transformers import AutoModelForCausalLM

from midus_hf.look.usage import record_usage
from midus_hf.memories.module import MemoryModule
from midus_hf.training.adapters import lora_config
from midus_hf.training.optim.freezing import set_trainable
from midus_hf.training.optim.parameter_groups import parameter_groups
from midus_hf.training.optim.rates import Rates

NEW_LAYERS = [1, 4]


def fresh_model(family: str, memory_type: str = "headwise", dtype: torch.dtype = torch.float32):
    """A model whose memories hold zeros and whose config says what is new, as `upscale` makes them."""
    model = upscaled_model(family, acting=False, memory_type=memory_type, dtype=dtype)
    model.config.upscale = {"new_layers": NEW_LAYERS, "trainable": "new"}
    return model


def train_four_steps(model, **rates) -> None:
    train_steps(model, 4, parameter_groups(model, Rates(learning_rate=1e-2, weight_decay=0.1, **rates)))


@pytest.mark.parametrize(
    ("family", "memory_type"),
    by_default(zip(("llama", "qwen2", "gemma3"), SIZES, strict=True), itertools.product(FAMILIES, SIZES)),
)
def test_the_offered_config_adapts_the_base_and_trains_new_layers_whole(family, memory_type, tmp_path):
    torch.manual_seed(0)
    base = fresh_model(family, memory_type)
    untrained = logits(base)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = get_peft_model(base, lora_config(base, r=4))
    assert torch.equal(logits(model), untrained)
    for layer in range(6):
        assert adapted_projections(model, layer) == (set() if layer in NEW_LAYERS else LINEAR)

    start = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the memory values")
        train_four_steps(model)
    for name, parameter in model.named_parameters():
        whole = re.search(r"layers\.[14]\.modules_to_save\.default\.", name) is not None
        assert parameter.requires_grad == (whole or "lora_" in name), name
        assert torch.equal(parameter, start[name]) != parameter.requires_grad, name
    assert not torch.allclose(logits(model), untrained, atol=1e-3)

    merged = assert_saved_and_merged(model, lambda: fresh_model(family, memory_type), tmp_path / "adapter")
    merged.save_pretrained(tmp_path / "merged")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(logits(loaded), logits(merged))
    assert loaded.state_dict().keys() == before.keys()
    assert loaded.config.upscale == {"new_layers": NEW_LAYERS, "trainable": "new"}
    assert loaded.config.memory == base.config.memory != []
    assert all(m.value_bank.any() for m in loaded.modules() if isinstance(m, MemoryModule))


def test_keys_and_values_have_their_group_beside_adapters():
    model = fresh_model("llama")
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
    model = fresh_model("llama")
    config = lora_config(model, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj"], modules_to_save=["lm_head"])
    assert (config.r, config.lora_alpha, config.lora_dropout) == (16, 8, 0.1)
    assert config.modules_to_save == ["model.layers.1", "model.layers.4", "lm_head"]
    wrapped = get_peft_model(model, config)
    assert adapted_projections(wrapped, 0) == {"q_proj"} and adapted_projections(wrapped, 1) == set()


def test_new_layers_of_a_dense_method_train_whole_too():
    model = tiny_model("mistral")
    model.config.upscale = {"new_layers": [2], "trainable": "new"}
    wrapped = get_peft_model(model, lora_config(model, r=2))
    trains = {name for name, parameter in wrapped.named_parameters() if parameter.requires_grad}
    assert {name for name in trains if "lora_" not in name} == {
        name for name, _ in wrapped.named_parameters() if "layers.2.modules_to_save." in name
    }


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_offered_config_trains_the_same_under_activation_checkpointing(family):
    def adapted():
        model = upscaled_model(family)
        model.config.upscale = {"new_layers": NEW_LAYERS}
        return get_peft_model(model, lora_config(model, r=4))

    assert_checkpointing_changes_no_gradient(adapted)


def test_a_model_that_was_not_upscaled_or_is_wrapped_already_is_refused():
    with refused(r"this llama model records no new layers in upscale.new_layers, which would"):
        lora_config(tiny_model("llama"))
    model = fresh_model("llama")
    wrapped = get_peft_model(model, lora_config(model))
    with refused(r"the model is wrapped by PEFT already; expected the model that from_pretrained returns"):
        lora_config(wrapped)
    with refused(r"this midus_llama model is wrapped by PEFT, which has set what trains"):
        set_trainable(wrapped)

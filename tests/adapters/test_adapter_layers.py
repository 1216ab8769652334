"""An adapter that was made for the base of an upscaled model would find the wrong layers there, and is refused."""

import re
import shutil

import pytest
import torch
from adapters.adapted_models import save_adapter
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import logits
from training.tiny_run import refused
from transformers import AutoModel, AutoModelForCausalLM

from midus_hf.training.adapters import lora_config

TARGETS = {"r": 2, "target_modules": ["q_proj", "down_proj"]}
REFUSED = (
    r"adapter .default. has weights for layers 0 to 3 and none for (4, )?5, .* layer (1|2) of the base is layer (2|3) here\. .* "
    r"Expected an adapter that was trained on this model\. .* upscale that\."
)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_an_adapter_of_the_base_is_refused_by_either_loader(family, upscaled, tmp_path):
    folder = upscaled(family)
    # New layers of this method have attention and no feed-forward part.
    config = LoraConfig(**{**TARGETS, "target_modules": ["down_proj"]})
    save_adapter(AutoModelForCausalLM.from_pretrained(folder.parent / "base"), config, tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with refused(REFUSED + r" This model now has the adapter: load the model again\."):
        model.load_adapter(str(tmp_path / "adapter"))
    with refused(REFUSED):
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter")


def test_adapter_of_the_base_s_stack_is_refused(upscaled, tmp_path):
    folder, config = upscaled("llama"), LoraConfig(**TARGETS)
    get_peft_model(AutoModel.from_pretrained(folder.parent / "base"), config).save_pretrained(tmp_path)
    with refused(r"none for 4, 5, which its targets also match"):
        PeftModel.from_pretrained(AutoModel.from_pretrained(folder), tmp_path)
    with refused("adapter 'second' has weights for layers 0 to 3"):
        get_peft_model(AutoModel.from_pretrained(folder), config).load_adapter(tmp_path, adapter_name="second")


@pytest.mark.parametrize("of", ["targets", "lora_config", "last layers"])
def test_adapter_of_a_moved_upscaled_model_is_loaded(of, upscaled, tmp_path, recwarn):
    model = AutoModelForCausalLM.from_pretrained(shutil.copytree(upscaled("llama"), tmp_path / "model"))
    config = lora_config(model, r=2) if of == "lora_config" else LoraConfig(**TARGETS)
    if of == "last layers":
        config.layers_to_transform = [3, 5]
    expected = logits(save_adapter(model, config, tmp_path / "adapter"))
    moved = (tmp_path / "model").rename(tmp_path / "moved")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(moved), tmp_path / "adapter")
    assert torch.equal(logits(loaded), expected)
    if of == "targets":
        model = AutoModelForCausalLM.from_pretrained(moved)
        model.load_adapter(str(tmp_path / "adapter"))
        assert torch.equal(logits(model), expected)
    assert not [warning for warning in recwarn if "trained on" in str(warning.message)]


@pytest.mark.parametrize("loader", ["peft", "transformers"])
def test_adapter_of_few_layers_from_another_model_warns(loader, upscaled, tmp_path):
    folder = upscaled("llama")
    config = LoraConfig(**TARGETS, layers_to_transform=[0, 1])
    save_adapter(AutoModelForCausalLM.from_pretrained(folder.parent / "base"), config, tmp_path / "adapter")
    message = "changes layers 0 to 1. If that is the base of this model, these are the wrong layers: layer 1 of the base is layer 2"
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.warns(UserWarning, match=re.escape(message)) as said:
        if loader == "peft":
            PeftModel.from_pretrained(model, tmp_path / "adapter")
        else:
            model.load_adapter(str(tmp_path / "adapter"))
    assert len([each for each in said if "wrong layers" in str(each.message)]) == 1

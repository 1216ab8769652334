"""Models larger than the memory of their device: accelerate keeps layers on disk and loads them as they run."""

import pytest
import torch
from accelerate import cpu_offload, infer_auto_device_map
from models.upscaled import upscaled_model
from tiny import prompt
from transformers import AutoModelForCausalLM


@pytest.fixture
def saved(family, tmp_path):
    """A folder with an upscaled model, its logits and its greedy tokens."""
    model = upscaled_model(family)
    model.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        logits = model(prompt()).logits
    return tmp_path / "model", logits, model.generate(prompt(), max_new_tokens=4, do_sample=False)


@pytest.mark.parametrize("on_disk", [(1, 4), (0, 1, 2, 3, 4, 5)], ids=["blocks", "every-layer"])
def test_layers_on_disk_give_the_same_output(saved, on_disk, tmp_path):
    folder, logits, tokens = saved
    device_map = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    device_map |= {f"model.layers.{layer}": "disk" if layer in on_disk else "cpu" for layer in range(6)}
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=device_map, offload_folder=tmp_path / "offload")
    assert model.model.layers[1].memory.value_bank.is_meta
    with torch.no_grad():
        assert torch.equal(model(prompt()).logits, logits)
    assert torch.equal(model.generate(prompt(), max_new_tokens=4, do_sample=False), tokens)


def test_weights_fetched_module_by_module_give_the_same_output(saved):
    folder, logits, tokens = saved
    model = cpu_offload(AutoModelForCausalLM.from_pretrained(folder), execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in model.parameters())
    with torch.no_grad():
        assert torch.equal(model(prompt()).logits, logits)
    assert torch.equal(model.generate(prompt(), max_new_tokens=4, do_sample=False), tokens)


def test_an_automatic_device_map_never_splits_a_block(family):
    model = upscaled_model(family)
    assert {type(layer).__name__ for layer in model.model.layers} == set(model._no_split_modules) & {
        type(layer).__name__ for layer in model.model.layers
    }
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    for share in (0.3, 0.5, 0.7):
        device_map = infer_auto_device_map(
            model, max_memory={"cpu": int(share * size)}, no_split_module_classes=list(model._no_split_modules)
        )
        assert set(device_map.values()) == {"cpu", "disk"}
        assert not [name for name in device_map if name.startswith("model.layers.") and name.count(".") > 2]


def test_device_map_auto_loads(saved):
    folder, logits, _ = saved
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, device_map="auto")
        assert torch.equal(model(prompt().to(model.device)).logits.cpu(), logits)

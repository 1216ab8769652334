"""Memories and the tables that their layers share run from disk, with the same output."""

import pytest
import torch
from accelerate import cpu_offload, infer_auto_device_map
from sites.cases import SOME, each
from tiny import prompt
from transformers import AutoModelForCausalLM

GREEDY = {"max_new_tokens": 4, "do_sample": False}


@pytest.fixture
def saved(toy_model, tmp_path):
    """Save a model; give the folder, its logits and its greedy tokens."""

    def save(case, family):
        model = toy_model(case, family)
        model.save_pretrained(tmp_path / "model")
        with torch.no_grad():
            return tmp_path / "model", model(prompt()).logits, model.generate(prompt(), **GREEDY)

    return save


@pytest.mark.parametrize("layers_on_disk", ["odd", "all"])
@each(SOME)
def test_layers_and_tables_on_disk_give_the_same_output(case, family, layers_on_disk, saved, tmp_path):
    folder, logits, tokens = saved(case, family)
    device_map = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    for layer in range(4 if case.is_attached else 6):
        device_map[f"model.layers.{layer}"] = "disk" if layers_on_disk == "all" or layer % 2 else "cpu"
    if case.shares_tables:
        device_map["model.memory_tables"] = "disk"
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=device_map, offload_folder=tmp_path / "offload")
    if case.shares_tables:
        assert all(parameter.is_meta for parameter in model.model.memory_tables.parameters())
    with torch.no_grad():
        assert torch.equal(model(prompt()).logits, logits)
    assert torch.equal(model.generate(prompt(), **GREEDY), tokens)


@each(SOME)
def test_weights_fetched_module_by_module_give_the_same_output(case, family, saved):
    folder, logits, tokens = saved(case, family)
    model = cpu_offload(AutoModelForCausalLM.from_pretrained(folder), execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in model.parameters())
    with torch.no_grad():
        assert torch.equal(model(prompt()).logits, logits)
    assert torch.equal(model.generate(prompt(), **GREEDY), tokens)


@each(SOME)
def test_an_automatic_device_map_never_splits_a_layer(case, family, toy_model):
    model = toy_model(case, family)
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    for share in (0.7, 0.85):
        device_map = infer_auto_device_map(
            model, max_memory={"cpu": int(share * size)}, no_split_module_classes=list(model._no_split_modules)
        )
        assert set(device_map.values()) == {"cpu", "disk"}
        assert not [name for name in device_map if name.startswith("model.layers.") and name.count(".") > 2]

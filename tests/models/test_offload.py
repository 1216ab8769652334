"""Models larger than the memory of their device: accelerate keeps layers on disk and loads them as they run."""

import pytest
import torch
from accelerate import cpu_offload, infer_auto_device_map
from models.cases import CASES, GREEDY, chosen_in_turn
from pairs import by_default
from tiny import logits, prompt
from transformers import AutoModelForCausalLM

TWO_TOKENS = {**GREEDY, "max_new_tokens": 2, "min_new_tokens": 2}


@pytest.mark.parametrize(("case", "layers"), chosen_in_turn(["odd", "all"]))
def test_offloaded_layers_give_the_same_output(native_family, case, layers, tmp_path):
    model, arguments = CASES[case].model(native_family, tmp_path / "made", torch.float32), CASES[case].given()
    expected, generated = logits(model, prompt(), **arguments), model.generate(prompt(), **TWO_TOKENS, **arguments)
    saved = tmp_path / "saved"
    model.save_pretrained(saved)
    places = {f"model.{name}": "cpu" for name, _ in model.model.named_children() if name != "layers"}
    if "model.memory_tables" in places:
        places["model.memory_tables"] = "disk"
    places |= {
        f"model.layers.{layer}": "disk" if layers == "all" or layer % 2 else "cpu"
        for layer in range(len(model.model.layers))
    }
    on_disk = AutoModelForCausalLM.from_pretrained(
        saved, device_map={**places, "lm_head": "cpu"}, offload_folder=tmp_path / "offload"
    )
    one_by_one = cpu_offload(AutoModelForCausalLM.from_pretrained(saved), execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in one_by_one.parameters())
    for loaded in (on_disk, one_by_one):
        assert all(parameter.is_meta for parameter in loaded.model.layers[1].parameters())
        assert all(parameter.is_meta for name, parameter in loaded.named_parameters() if ".memory_tables." in name)
        assert torch.equal(logits(loaded, prompt(), **arguments), expected)
    decodes = on_disk if layers == "all" else one_by_one
    assert torch.equal(decodes.generate(prompt(), **TWO_TOKENS, **arguments), generated)


@pytest.mark.parametrize("case", by_default(["midus-hml", "chunk", "all fetched"], CASES))
def test_an_automatic_device_map_never_splits_a_layer(native_family, case, tmp_path):
    model = CASES[case].model(native_family, tmp_path, torch.float32)
    assert {type(layer).__name__ for layer in model.model.layers} <= set(model._no_split_modules)
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    for share in (0.7, 0.85):
        device_map = infer_auto_device_map(
            model, max_memory={"cpu": int(share * size)}, no_split_module_classes=list(model._no_split_modules)
        )
        assert set(device_map.values()) == {"cpu", "disk"}
        assert not [name for name in device_map if name.startswith("model.layers.") and name.count(".") > 2]

"""Models whose heads read the depth, larger than their device: slots go from layer to layer, wherever the layers' weights are."""

import pytest
import torch
from accelerate import cpu_offload, infer_auto_device_map
from models.depth_models import depth_model, logits
from tiny import prompt
from transformers import AutoModelForCausalLM

GREEDY = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}


@pytest.mark.parametrize("on_disk", [(1, 3), (0, 1, 2, 3)], ids=["odd", "all"])
@pytest.mark.parametrize("kind", ["default", "released", "last"])
def test_layers_on_disk_and_modules_fetched_one_by_one_give_the_same(native_family, kind, on_disk, tmp_path):
    model, tokens = depth_model(native_family, kind, torch.float32), prompt()
    expected, generated = logits(model, tokens), model.generate(tokens, **GREEDY)
    model.save_pretrained(tmp_path / "model")
    device_map = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    device_map |= {f"model.layers.{layer}": "disk" if layer in on_disk else "cpu" for layer in range(4)}
    for loaded in (
        AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
        ),
        cpu_offload(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), execution_device=torch.device("cpu")),
    ):
        assert loaded.model.layers[1].memories["depth-attention"].depth_gate.is_meta
        assert torch.equal(logits(loaded, tokens), expected)
        assert torch.equal(loaded.generate(tokens, **GREEDY), generated)


def test_an_automatic_device_map_never_splits_a_layer(family):
    model = depth_model(family)
    size = sum(parameter.numel() * 8 for parameter in model.parameters())
    device_map = infer_auto_device_map(
        model, max_memory={"cpu": int(0.7 * size)}, no_split_module_classes=list(model._no_split_modules)
    )
    assert set(device_map.values()) == {"cpu", "disk"}
    assert not [name for name in device_map if name.startswith("model.layers.") and name.count(".") > 2]

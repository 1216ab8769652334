"""PEFT's adapters on models whose heads read the depth."""

import pytest
import torch
from models.depth_models import KINDS, depth_model, logits
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import prompt
from transformers import AutoModelForCausalLM

GREEDY = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": 0}


def adapted_model(model, **options):
    torch.manual_seed(0)
    options = {"target_modules": "all-linear", "r": 4, **options}
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options)).eval()


def let_act(adapted):
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_on_all_projections_change_nothing_then_act_and_are_merged(native_family, kind):
    model, tokens = depth_model(native_family, kind), prompt(9)
    expected = logits(model, tokens)
    projected = {
        name.split(".")[-2] for name, _ in model.named_parameters() if "memories" in name and "weight" in name[-6:]
    }
    adapted = adapted_model(model)
    assert torch.equal(logits(adapted, tokens), expected)
    names = {name for name, _ in adapted.named_modules() if "memories" in name and name.endswith(".lora_B.default")}
    assert {name.split(".")[-3] for name in names} == projected - {"depth-attention"}
    let_act(adapted)
    changed = logits(adapted, tokens)
    assert not torch.allclose(changed, expected, atol=1e-3)
    generated = adapted.generate(input_ids=tokens, **GREEDY)
    assert torch.equal(generated[:, 9], changed[:, -1].argmax(-1))
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(logits(merged, tokens), changed, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("target", ["k_proj", "v_proj"])
def test_slots_are_what_adapted_projections_give(target):
    """Keys and values that later layers read are those that the layer itself reads."""
    changed = []
    for kind in ("attention", "released"):
        adapted = adapted_model(depth_model("qwen3", kind), target_modules=[target])
        let_act(adapted)
        changed.append(logits(adapted, prompt()))
        torch.testing.assert_close(logits(adapted.merge_and_unload(), prompt()), changed[-1], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(*changed)


@pytest.mark.parametrize("kind", ["default", "reused"])
def test_adapters_train_and_are_saved_apart(kind, tmp_path):
    model = depth_model("llama", kind, torch.float32)
    model.save_pretrained(tmp_path / "base")
    adapted = adapted_model(model, modules_to_save=["ffn_key"]).train()
    let_act(adapted)
    adapted(input_ids=prompt(), labels=prompt(), use_cache=False).loss.backward()
    for name, parameter in adapted.named_parameters():
        trained = "lora_" in name or "modules_to_save" in name
        assert (parameter.grad is not None and bool(parameter.grad.any())) == trained, name
    adapted.eval().save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    torch.testing.assert_close(logits(again.eval(), prompt()), logits(adapted, prompt()), rtol=1e-5, atol=1e-5)

"""PEFT's adapters on models whose memories read the depth, fetch blocks, or are those of UltraMemV2."""

import pytest
import torch
from adapters.adapted_models import adapted_model, let_act, logits
from models.depth_models import KINDS as DEPTH
from models.depth_models import depth_model
from models.hierarchical_models import IDS, OTHER_IDS, hierarchical_model
from models.hierarchical_models import KINDS as FETCHING
from models.ultramem_models import ultramem_model
from pairs import by_default
from peft import PeftModel
from tiny import prompt
from transformers import AutoModelForCausalLM

from midus_hf.training.blocks import train_blocks

GREEDY = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": 0}


@pytest.mark.parametrize(
    "kind",
    by_default(["default", "reused", "projected", "some", *FETCHING, "own"], [*DEPTH, *FETCHING, "own", "heads"]),
)
def test_adapters_on_all_projections_change_nothing_then_act_and_are_merged(native_family, kind, tmp_path):
    tokens, inputs = prompt(6), {"memory_ids": IDS} if kind in FETCHING else {}
    if kind in FETCHING:
        model = hierarchical_model(native_family, kind, tmp_path)
    else:
        model = (depth_model if kind in DEPTH else ultramem_model)(native_family, kind)
    expected = logits(model, tokens, **inputs)
    weights = [name.split(".") for name, _ in model.named_parameters() if name.endswith(".weight")]
    projections = {name[-2] for name in weights if "memories" in name and "norm" not in name[-2]}
    adapted = adapted_model(model)
    assert torch.equal(logits(adapted, tokens, **inputs), expected)
    names = [name.split(".") for name, _ in adapted.named_modules() if name.endswith(".lora_B.default")]
    assert {name[-3] for name in names if "memories" in name} == projections
    let_act(adapted)
    changed = logits(adapted, tokens, **inputs)
    assert not torch.allclose(changed, expected, atol=1e-3)
    if kind in FETCHING:
        assert not torch.allclose(changed, logits(adapted, tokens, memory_ids=OTHER_IDS))
    generated = adapted.generate(input_ids=tokens, **inputs, **GREEDY)
    assert torch.equal(generated[:, 6], changed[:, -1].argmax(-1))
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(logits(merged, tokens, **inputs), changed)
    merged.save_pretrained(tmp_path / "merged")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")  # has rotary frequencies in float32
    torch.testing.assert_close(logits(loaded, tokens, **inputs), changed, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("target", ["k_proj", "v_proj"])
def test_slots_are_what_adapted_projections_give(target):
    """Keys and values that later layers read are those that the layer itself reads."""
    adapted = adapted_model(depth_model("qwen3", "attention"), [target])
    let_act(adapted)
    changed = logits(adapted)
    torch.testing.assert_close(logits(adapted.merge_and_unload()), changed, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["default", "reused", "fetching"])
def test_adapters_train_and_are_saved_apart(kind, tmp_path):
    """Blocks of banks train beside them."""
    inputs, options = {}, {"modules_to_save": ["ffn_key"]}
    if kind == "fetching":
        model, inputs, options = hierarchical_model("llama", FETCHING, tmp_path / "first", torch.float32), {}, {}
        inputs = {"memory_ids": IDS}
    else:
        model = depth_model("llama", kind, torch.float32)
    model.save_pretrained(tmp_path / "base")
    adapted = adapted_model(model, **options).train()
    let_act(adapted)
    banks = train_blocks(model.banks) if kind == "fetching" else {}
    adapted(input_ids=prompt(6), labels=prompt(6), **inputs).loss.backward()
    assert all(len(bank.leaves()) == 4 for bank in banks.values()) and bool(banks) == (kind == "fetching")
    for name, parameter in adapted.named_parameters():
        trained = "lora_" in name or "modules_to_save" in name
        assert (parameter.grad is not None) == trained, name
        assert kind == "fetching" or not trained or parameter.grad.any(), name
    adapted.eval().save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    expected = logits(adapted, prompt(6), **inputs)
    torch.testing.assert_close(logits(again, prompt(6), **inputs), expected, rtol=1e-5, atol=1e-5)

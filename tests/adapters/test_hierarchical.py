"""PEFT's adapters on a model whose memories fetch blocks."""

import pytest
import torch
from models.hierarchical_models import IDS, KINDS, OTHER_IDS, hierarchical_model, logits
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import prompt
from transformers import AutoModelForCausalLM

SETTINGS = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": 0}


def adapted_model(model):
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(target_modules="all-linear", r=4, task_type="CAUSAL_LM")).eval()


def let_act(adapted):
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_on_all_projections_act_beside_fetched_blocks_and_are_merged(native_family, kind, tmp_path):
    model = hierarchical_model(native_family, kind, tmp_path)
    expected = {
        given: logits(model, prompt(6), memory_ids=ids) for given, ids in (("first", IDS), ("second", OTHER_IDS))
    }
    adapted = adapted_model(model)
    assert torch.equal(logits(adapted, prompt(6), memory_ids=IDS), expected["first"])
    let_act(adapted)
    changed = logits(adapted, prompt(6), memory_ids=IDS)
    assert not torch.allclose(changed, expected["first"])
    assert not torch.allclose(changed, logits(adapted, prompt(6), memory_ids=OTHER_IDS))
    generated = adapted.generate(input_ids=prompt(6), memory_ids=IDS, **SETTINGS)
    assert torch.equal(generated[:, 6], changed[:, -1].argmax(-1))
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(logits(merged, prompt(6), memory_ids=IDS), changed)
    merged.save_pretrained(tmp_path / "merged")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()  # has rotary frequencies in float32
    torch.testing.assert_close(logits(loaded, prompt(6), memory_ids=IDS), changed, rtol=1e-4, atol=1e-5)


def test_adapters_and_blocks_train_together_and_are_saved_apart(tmp_path):
    model = hierarchical_model("llama", KINDS, tmp_path / "first", torch.float32)
    model.save_pretrained(tmp_path / "base")
    adapted = adapted_model(model).train()
    let_act(adapted)
    banks = model.banks.train()
    adapted(input_ids=prompt(6), labels=prompt(6), memory_ids=IDS).loss.backward()
    assert all(len(bank.leaves()) == 4 for bank in banks.values())
    gradients = {name: value.grad for name, value in adapted.named_parameters()}
    assert all((gradient is not None) == ("lora_" in name) for name, gradient in gradients.items())
    adapted.eval().save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(
        logits(again, prompt(6), memory_ids=IDS), logits(adapted, prompt(6), memory_ids=IDS), rtol=1e-5, atol=1e-5
    )

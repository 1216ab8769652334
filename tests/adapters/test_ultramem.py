"""PEFT's adapters on the projections of UltraMemV2."""

import pytest
import torch
from models.ultramem_models import logits, ultramem_model
from peft import LoraConfig, get_peft_model
from tiny import prompt


@pytest.mark.parametrize("kind", ["own", "expanded"])
def test_adapters_on_all_projections_change_nothing_and_are_merged(kind):
    model, tokens = ultramem_model("llama", kind), prompt(length=6)
    expected = logits(model, tokens)
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", r=4, task_type="CAUSAL_LM")).eval()
    assert torch.equal(logits(adapted, tokens), expected)
    names = [
        name for name, _ in adapted.named_modules() if "memories.ultramem" in name and name.endswith(".lora_B.default")
    ]
    assert {name.split(".")[-3] for name in names} == {"query_projection", "pre_projection", "value_projection"}
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    changed = logits(adapted, tokens)
    assert not torch.allclose(changed, expected)
    torch.testing.assert_close(logits(adapted.merge_and_unload(), tokens), changed)

"""PEFT's adapters on Mixture of Chapters: what generation keeps of projected chapters heeds them."""

from typing import Any

import pytest
import torch
from models.chapter_models import chapter_model
from models.generated_logits import CLOSE, generated, passed
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from tiny import prompt


@pytest.mark.parametrize("targets", [["key_projection"], ["value_projection"], ["query_projection"]], ids=str)
def test_an_adapter_beside_a_projection_is_heeded(targets):
    model = get_peft_model(
        chapter_model(), LoraConfig(target_modules=targets, r=2, task_type="CAUSAL_LM", init_lora_weights=False)
    ).eval()
    model.to(torch.float64)
    adapted = generated(model)
    torch.testing.assert_close(adapted[:, 0], passed(model), **CLOSE)
    with model.disable_adapter():
        bare = generated(model)
        torch.testing.assert_close(bare[:, 0], passed(model), **CLOSE)
    assert not torch.allclose(adapted[:, 0], bare[:, 0], atol=1e-4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(-2)
    torch.testing.assert_close(generated(model)[:, 0], passed(model), **CLOSE)
    merged = model.merge_and_unload()
    torch.testing.assert_close(generated(merged)[:, 0], passed(merged), **CLOSE)


def test_copies_that_peft_trains_are_read():
    whole = ["layers.1.memories.chapters", "layers.3.memories.chapters", "memory_tables.chapters.0"]
    config = LoraConfig(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM", modules_to_save=whole)
    model = get_peft_model(chapter_model(), config).eval()
    before = generated(model)
    torch.testing.assert_close(before[:, 0], passed(model), **CLOSE)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name and name.endswith(("bank", "key_projection.weight")):
                parameter.add_(1)
    after = generated(model)
    assert not torch.allclose(after[:, 0], before[:, 0], atol=1e-4)
    torch.testing.assert_close(after[:, 0], passed(model), **CLOSE)
    with model.disable_adapter():
        torch.testing.assert_close(generated(model), before, **CLOSE)


def prefixed(routing: str) -> Any:
    torch.manual_seed(0)
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    return get_peft_model(chapter_model(routing=routing, dtype=torch.float32), config)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # PEFT's word
def test_a_prefix_trains_where_memories_keep_nothing_of_the_sequence():
    model = prefixed("token")
    model(input_ids=prompt(), labels=prompt()).loss.backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(trained) == 1 and trained[0].grad.any()


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")  # under which PEFT passes its prefix
def test_a_prefix_that_memories_have_not_seen_is_refused():
    with pytest.raises(ValueError, match=r"Prefix tuning fills a cache of its own: tune a prompt instead"):
        prefixed("chunk").eval()(input_ids=prompt(), labels=prompt())


def test_a_prompt_trains_instead():
    torch.manual_seed(0)
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = get_peft_model(chapter_model(dtype=torch.float32), config)
    model(input_ids=prompt(), labels=prompt()).loss.backward()
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad.any()]

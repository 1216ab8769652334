"""PEFT's adapters on models whose memories read the depth, fetch blocks, or are those of UltraMemV2."""

import pytest
import torch
from adapters.adapted_models import adapted_model, let_act, logits
from models.chapter_models import chapter_model
from models.depth_models import KINDS as DEPTH
from models.depth_models import depth_model
from models.hierarchical_models import IDS, OTHER_IDS, hierarchical_model
from models.hierarchical_models import KINDS as FETCHING
from models.ultramem_models import ultramem_model
from pairs import by_default
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from tiny import prompt
from transformers import AutoModelForCausalLM

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


# `generate` gives logits in float32.
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def generated(model):
    """Return logits `[B, 3, V]` that generation computes with what it keeps."""
    output = model.generate(input_ids=prompt(7), **GREEDY, output_logits=True, return_dict_in_generate=True)
    return torch.stack(output.logits, dim=1).double()


def passed(model):
    """Return logits `[B, V]` of the first token that is generated, by a pass with gradients, which keeps nothing."""
    return model(input_ids=prompt(7), use_cache=False).logits[:, -1].detach()


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


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # PEFT's word
def test_a_prompt_trains_and_a_prefix_where_memories_keep_nothing_of_the_sequence():
    def loss(kind: type, routing: str) -> torch.Tensor:
        torch.manual_seed(0)
        config = kind(task_type="CAUSAL_LM", num_virtual_tokens=4)
        model = get_peft_model(chapter_model(routing=routing, dtype=torch.float32), config)
        trained.extend(parameter for parameter in model.parameters() if parameter.requires_grad)
        return model(input_ids=prompt(), labels=prompt()).loss

    for kind, routing in ((PromptTuningConfig, "chunk"), (PrefixTuningConfig, "token")):
        trained = []
        loss(kind, routing).backward()
        assert len(trained) == 1 and trained[0].grad.any()
    with pytest.raises(ValueError, match=r"Prefix tuning fills a cache of its own: tune a prompt instead"):
        loss(PrefixTuningConfig, "chunk")

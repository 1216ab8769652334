"""PEFT on models with memory: the config that is offered for them, and adapters on inserted and attached memories of all kinds."""

import pytest
import torch
from adapters.adapted_models import adapted_model, let_act
from models.memory_models import DEPTHS as DEPTH
from models.memory_models import (
    FETCHING,
    IDS,
    OTHER_IDS,
    chapter_model,
    depth_model,
    hierarchical_model,
    ultramem_model,
)
from models.upscaled import upscaled_model
from pairs import by_default
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from tiny import logits, prompt, tiny_model
from training.tiny_run import refused
from transformers import AutoModelForCausalLM

from midus_hf.look.usage import record_usage
from midus_hf.training.adapters import lora_config
from midus_hf.training.keys import Rates
from midus_hf.training.optim import parameter_groups, set_trainable

NEW_LAYERS = [1, 4]
GREEDY = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": 0}


def fresh_model():
    """A model whose memories hold zeros and whose config says what is new, as `upscale` makes them."""
    model = upscaled_model("llama", acting=False)
    model.config.upscale = {"new_layers": NEW_LAYERS, "trainable": "new"}
    return model


def test_lora_config_trains_new_layers_whole():
    for model, new in ((fresh_model(), NEW_LAYERS), (tiny_model("mistral"), [2])):  # which is of a dense method
        model.config.upscale = {"new_layers": new, "trainable": "new"}
        options = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
        config = lora_config(model, lora_alpha=8, lora_dropout=0.1, **options)
        assert (config.r, config.lora_alpha, config.lora_dropout) == (16, 8, 0.1)
        assert config.modules_to_save == [*(f"model.layers.{layer}" for layer in new), "lm_head"]
        wrapped = get_peft_model(model, config)
        names = {id(parameter): name for name, parameter in wrapped.named_parameters() if parameter.requires_grad}
        layers = range(model.config.num_hidden_layers)
        prefix = "base_model.model.model.layers"
        assert {name for name in names.values() if "lora_A" in name} == {
            f"{prefix}.{layer}.self_attn.q_proj.lora_A.default.weight" for layer in layers if layer not in new
        }
        whole = tuple(f"{prefix}.{layer}.modules_to_save." for layer in new)
        assert {name for name in names.values() if "lora_" not in name and "lm_head" not in name} == {
            name for name, _ in wrapped.named_parameters() if name.startswith(whole)
        }
        groups = parameter_groups(wrapped, Rates(learning_rate=1e-3, weight_decay=0.1))
        kinds = {group["name"]: [names[id(parameter)] for parameter in group["params"]] for group in groups}
        assert any("lora_A" in name for name in kinds["decay"])
        for kind, of_memory in (("keys", ("row_keys", "column_keys")), ("values", ("value_bank",))):
            assert len(kinds.get(kind, [])) == (len(new) * len(of_memory) if new == NEW_LAYERS else 0)
            assert all(name.endswith(of_memory) for name in kinds.get(kind, []))


def test_usage_counts_slots_of_trained_layers():
    model = upscaled_model("llama")
    model.config.upscale = {"new_layers": NEW_LAYERS}
    with record_usage(model) as plain:
        logits(model)
    wrapped = get_peft_model(model, lora_config(model))
    with record_usage(wrapped) as usage:
        logits(wrapped)
    assert list(usage) == list(map(str, NEW_LAYERS))
    assert all(torch.equal(counts, plain[layer]) and counts.any() for layer, counts in usage.items())


def test_plain_or_wrapped_models_are_refused():
    with refused("this llama model records no new layers"):
        lora_config(tiny_model("llama"))
    model = fresh_model()
    wrapped = get_peft_model(model, lora_config(model))
    with refused("wrapped by PEFT already; expected the model"):
        lora_config(wrapped)
    with refused("wrapped by PEFT, which decides what is trained"):
        set_trainable(wrapped)


# `generate` gives logits in float32.
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def generated(model):
    """Return logits `[B, 3, V]` that generation computes with what it keeps."""
    output = model.generate(input_ids=prompt(7), **GREEDY, output_logits=True, return_dict_in_generate=True)
    return torch.stack(output.logits, dim=1).double()


def passed(model):
    """Return logits `[B, V]` of the first token that is generated, by a pass with gradients, which keeps nothing."""
    return model(input_ids=prompt(7), use_cache=False).logits[:, -1].detach()


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]], ids=str)
def test_adapters_land_on_the_projections_that_a_block_has(family, targets):
    model = adapted_model(upscaled_model(family), targets)
    of_block = {"q_proj", "k_proj", "v_proj"}
    every = {*of_block, "o_proj", "gate_proj", "up_proj", "down_proj"} if targets == "all-linear" else {*targets}
    adapted = [name.split(".") for name, _ in model.named_modules() if name.endswith(".lora_A.default")]
    for layer in range(6):
        expected = every & of_block if layer in NEW_LAYERS else every
        assert {parts[-3] for parts in adapted if f"layers.{layer}." in ".".join(parts)} == expected


@pytest.mark.parametrize(
    "kind",
    by_default(["default", "reused", "projected", "some", *FETCHING, "own"], [*DEPTH, *FETCHING, "own", "heads"]),
)
def test_adapters_on_memories_act_and_are_merged(native_family, kind, tmp_path):
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


@pytest.mark.parametrize("targets", [["key_projection"], ["value_projection"], ["query_projection"]], ids=str)
def test_an_adapter_beside_a_projection_is_heeded(targets):
    config = LoraConfig(target_modules=targets, r=2, task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(chapter_model(), config).eval().to(torch.float64)
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
def test_prompt_trains_and_prefix_without_states():
    def loss(kind: type, routing: str) -> torch.Tensor:
        torch.manual_seed(0)
        config = kind(task_type="CAUSAL_LM", num_virtual_tokens=4)
        model = get_peft_model(chapter_model(routing=routing, dtype=torch.float32), config)
        trained.extend(parameter for parameter in model.parameters() if parameter.requires_grad)
        return model(input_ids=prompt(), labels=prompt()).loss

    for kind, routing in ((PromptTuningConfig, "chunk"), (PrefixTuningConfig, "token")):
        trained = []
        loss(kind, routing).backward()
        assert len(trained) == 1, routing
        assert trained[0].grad.any(), routing
    with refused("Prefix tuning fills a cache of its own: tune a prompt"):
        loss(PrefixTuningConfig, "chunk")

"""PEFT's adapters on models with inserted memory blocks."""

import pytest
import torch
from models.optimizer_steps import train_steps
from models.upscaled import upscaled_model
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import prompt

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def lora(family: str, target_modules: str | list[str] = "all-linear", **options) -> PeftModel:
    torch.manual_seed(0)
    config = LoraConfig(target_modules=target_modules, r=4, lora_alpha=16, task_type="CAUSAL_LM", **options)
    return get_peft_model(upscaled_model(family), config)


def adapted(model: PeftModel, layer: int) -> set[str]:
    """Names of the projections of one layer that hold an adapter."""
    prefix = f"base_model.model.model.layers.{layer}."
    names = (name for name, _ in model.named_modules() if name.startswith(prefix) and name.endswith(".lora_A.default"))
    return {name.removeprefix(prefix).removesuffix(".lora_A.default").rpartition(".")[2] for name in names}


@pytest.mark.parametrize(
    "targets, of_block, of_layer",
    [
        ("all-linear", {"q_proj", "k_proj", "v_proj"}, {*ATTENTION, "gate_proj", "up_proj", "down_proj"}),
        (ATTENTION, {"q_proj", "k_proj", "v_proj"}, set(ATTENTION)),
        (["q_proj", "v_proj"], {"q_proj", "v_proj"}, {"q_proj", "v_proj"}),
    ],
    ids=["all-linear", "attention", "queries-and-values"],
)
def test_adapters_land_on_the_projections_that_exist(family, targets, of_block, of_layer):
    model = lora(family, targets)
    for layer in range(6):
        assert adapted(model, layer) == (of_block if layer in (1, 4) else of_layer)


def test_a_new_adapter_changes_nothing(family):
    with torch.no_grad():
        assert torch.equal(lora(family)(prompt()).logits, upscaled_model(family)(prompt()).logits)


@pytest.mark.parametrize("targets", ["all-linear", ATTENTION], ids=["all-linear", "attention"])
def test_a_trained_adapter_survives_saving_and_merging(family, targets, tmp_path):
    model = lora(family, targets)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        untrained = model(prompt()).logits
    train_steps(model, 2)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != ("lora_" in name), name
    with torch.no_grad():
        trained = model(prompt()).logits
    assert not torch.allclose(trained, untrained, atol=1e-3)

    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(upscaled_model(family), tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(prompt()).logits, trained)

    tokens = model.generate(input_ids=prompt(), max_new_tokens=6, do_sample=False)
    merged = model.merge_and_unload()
    with torch.no_grad():
        # Merging adds the product of A and B to a weight, which rounds once more.
        torch.testing.assert_close(merged(prompt()).logits, trained, rtol=1e-4, atol=1e-5)
    assert torch.equal(merged.generate(prompt(), max_new_tokens=6, do_sample=False), tokens)
    assert not any("lora" in name for name in merged.state_dict())


def test_memories_train_whole_beside_adapters(family, tmp_path):
    model = lora(family, ["q_proj", "v_proj"], modules_to_save=["memory"])
    before = {name: parameter.clone() for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert sum(name.endswith(".memory.modules_to_save.default.value_bank") for name in before) == 2
    train_steps(model, 2)
    assert all(not torch.equal(model.get_parameter(name), value) for name, value in before.items())
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(upscaled_model(family), tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(prompt()).logits, model(prompt()).logits)


@pytest.mark.parametrize("memory_type", ["product-key", "linear"])
@pytest.mark.parametrize("whole", [None, ["memory"]], ids=["frozen", "whole"])
def test_a_memory_with_batch_norm_is_after_saving_what_it_was(memory_type, whole, tmp_path):
    """Frozen, its statistics stand still; trained whole, they are saved with it."""
    config = LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=whole, r=4, task_type="CAUSAL_LM")
    model = get_peft_model(upscaled_model("llama", memory_type=memory_type), config)
    train_steps(model, 2)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(upscaled_model("llama", memory_type=memory_type), tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(prompt()).logits, model(prompt()).logits)


def test_adapters_train_the_same_under_activation_checkpointing(family):
    gradients = []
    for checkpointed in (False, True):
        model = lora(family).train()
        if checkpointed:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        model(input_ids=prompt(), labels=prompt(), use_cache=False).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())

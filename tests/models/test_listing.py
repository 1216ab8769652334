"""Losses that the Trainer computes, experts of older adapters: what other libraries decide by the name of a class or a type."""

import copy
import textwrap
import types
from typing import Any

import pytest
import torch
import transformers
from composite import composite_model
from models.fresh_process import run_python
from models.hosting import host_of
from models.upscaled import upscaled_model
from tiny import prompt, tiny_model
from transformers.models.auto import modeling_auto

from midus_hf.models import FAMILIES
from midus_hf.models.families.template import host_type
from scripts.anatomy.tiny import tiny_model as type_model
from upscalers.runs.upscale import upscale

_SMOOTHED = """
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

def smoothed(model, folder):
    arguments = TrainingArguments(folder, label_smoothing_factor=0.1, use_cpu=True, report_to=[], disable_tqdm=True)
    tokens = torch.arange(3, 27).view(2, 12)
    loss = Trainer(model.eval(), arguments).compute_loss(model, {"input_ids": tokens, "labels": tokens.clone()})
    with torch.no_grad():
        logp = model(tokens).logits[:, :-1].log_softmax(-1)
    expected = -(0.9 * logp.gather(-1, tokens[:, 1:, None])[..., 0] + 0.1 * logp.mean(-1)).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    return loss
"""
here: dict[str, Any] = {}
exec(_SMOOTHED, here)


def test_trainer_shifts_labels_that_it_smooths(family, tmp_path):
    base, model = tiny_model(family), upscaled_model(family, acting=False)
    assert torch.equal(here["smoothed"](model, tmp_path), here["smoothed"](base, tmp_path))


@pytest.mark.parametrize("model_type", ["llava", "gemma3"])
def test_trainer_shifts_labels_of_composite_models(model_type, tmp_path):
    composite_model(model_type).save_pretrained(tmp_path / "base")
    upscale(base=tmp_path / "base", method="midus-hml", output=tmp_path / "made", options={"n": 8, "k": 3})
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "made")
    here["smoothed"](model, tmp_path)
    for table in ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"):
        listed = getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES")
        assert listed[model.config.model_type] == type(model).__name__


def test_trainer_shifts_labels_without_the_package(tmp_path):
    upscaled_model("llama").save_pretrained(tmp_path / "made")
    code = 'smoothed(AutoModelForCausalLM.from_pretrained("made", trust_remote_code=True), "run")\n'
    run_python(_SMOOTHED + code, tmp_path, package_present=False)


def test_older_expert_adapters_find_the_experts():
    peft = pytest.importorskip("peft")
    host_type("mixtral")
    base = type_model("mixtral")
    config = peft.LoraConfig(target_modules=["q_proj", "w1", "w2", "w3"], task_type="CAUSAL_LM")
    hosted, native = (peft.get_peft_model(each, copy.deepcopy(config)) for each in (host_of(base), base))
    lora, found = ({name for name, _ in each.named_parameters() if "lora_" in name} for each in (native, hosted))
    assert lora == found and any("experts" in name for name in lora)


@pytest.mark.parametrize("model_type", ["hyperclovax", "granite", "gemma2"])
def test_fused_losses_of_trl_scale_logits_as_the_model_does(model_type):
    utils = pytest.importorskip("trl.trainer.utils")
    base = type_model(model_type)
    host_type(model_type)
    model = host_of(base).eval()
    if hasattr(model.config, "logits_scaling"):
        model.config.logits_scaling = 0.25
    assert "logit_scale" not in model.config.to_dict()
    tokens = prompt() % model.config.vocab_size
    with torch.no_grad():
        plain = model(tokens, labels=tokens).loss
        utils.add_fused_lm_head(model)
        fused = model(tokens, labels=tokens, fused_lm_head=True).loss
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)


def test_classes_are_shown_only_by_the_module_transformers():
    name = FAMILIES["gemma2"].__name__
    assert getattr(transformers, name) is FAMILIES["gemma2"]
    assert isinstance(transformers.models, types.ModuleType) and type(transformers.models) is type(transformers)
    assert not hasattr(transformers.models, name) and not hasattr(transformers.models.llama, name)


def test_broken_family_warns_and_others_load(tmp_path):
    program = """
        import warnings
        from transformers.models.qwen2 import modeling_qwen2
        del modeling_qwen2.Qwen2DecoderLayer
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            from midus_hf.models import FAMILIES
        print([str(each.message) for each in caught if "midus_qwen2" in str(each.message)], sorted(FAMILIES))
        """
    result = run_python(textwrap.dedent(program), tmp_path, package_present=True)
    message, _, families = result.rpartition("[")
    assert "checkpoints of midus_qwen2 cannot be loaded" in message
    assert "'llama'" in families and "'qwen2'" not in families

"""Other libraries ask for names of classes in lists of their own, in which no class of this project stands."""

import textwrap

import pytest
import torch
import torch.nn.functional as F
import transformers
from carried.computing import loaded
from models.fresh_process import run_python
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from tiny import prompt, save_tiny_model
from transformers import Trainer, TrainingArguments

from upscalers.runs.upscale import upscale

SMOOTHING = 0.1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("named")
    save_tiny_model("llama", folder / "base")
    upscale(base=folder / "base", method="midus-hml", output=folder / "hml", options={"n": 8, "k": 2}, verify=False)
    return folder / "hml"


def smoothed_loss_of_trainer(model, tokens, output):
    """Return the loss that a Trainer with label smoothing computes of a batch."""
    arguments = TrainingArguments(
        str(output), label_smoothing_factor=SMOOTHING, use_cpu=True, report_to="none", disable_tqdm=True
    )
    trainer = Trainer(model, arguments)
    with torch.no_grad():
        return trainer.compute_loss(model, {"input_ids": tokens, "labels": tokens.clone()})


def smoothed_loss(logits, labels):
    """Return the smoothed loss of each next token, computed by torch."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=SMOOTHING)


@pytest.mark.parametrize("with_adapter", [False, True], ids=["alone", "peft"])
def test_a_trainer_shifts_the_labels_of_the_losses_that_it_computes(folder, tmp_path, with_adapter):
    model = loaded(folder)
    if with_adapter:
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear")).eval()
    tokens = prompt()
    with torch.no_grad():
        expected = smoothed_loss(model(input_ids=tokens).logits, tokens)
    torch.testing.assert_close(smoothed_loss_of_trainer(model, tokens, tmp_path), expected)


def test_a_trainer_shifts_them_for_carried_code_too(folder, tmp_path):
    program = f"""
        import torch
        import torch.nn.functional as F
        from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
        model = AutoModelForCausalLM.from_pretrained({str(folder)!r}, dtype="float32", trust_remote_code=True).eval()
        tokens = torch.arange(24).reshape(2, 12)
        arguments = TrainingArguments({str(tmp_path)!r}, label_smoothing_factor={SMOOTHING}, use_cpu=True, report_to="none")
        with torch.no_grad():
            loss = Trainer(model, arguments).compute_loss(model, {{"input_ids": tokens, "labels": tokens.clone()}})
            logits = model(input_ids=tokens).logits
        expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), label_smoothing={SMOOTHING})
        torch.testing.assert_close(loss, expected)
        print("the same")
        """
    assert "the same" in run_python(textwrap.dedent(program), tmp_path, package_present=False)


def test_a_class_is_shown_in_the_module_of_transformers_alone():
    name = "MidusLlamaForCausalLM"
    assert getattr(transformers, name).__name__ == name
    assert not hasattr(transformers.models.llama, name)
    assert not hasattr(transformers.utils, name)
    assert not hasattr(type(transformers), name)


def test_a_family_that_cannot_be_made_is_a_warning_and_the_others_load(tmp_path):
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


def test_a_memory_with_a_state_takes_prompts_of_peft_and_refuses_prefixes(tmp_path):
    save_tiny_model("llama", tmp_path / "base")
    options = {"memory_tokens": 24, "chapters": 12, "k": 2}
    upscale(base=tmp_path / "base", method="moc", output=tmp_path / "moc", options=options, verify=False)
    tokens = prompt()
    prompted = get_peft_model(
        loaded(tmp_path / "moc"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    )
    prompted(input_ids=tokens, labels=tokens).loss.backward()
    assert all(each.grad is not None for each in prompted.parameters() if each.requires_grad)
    prefixed = get_peft_model(
        loaded(tmp_path / "moc"), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    )
    with pytest.raises(ValueError, match=r"Prefix tuning fills a cache of its own: tune a prompt instead"):
        prefixed(input_ids=tokens, labels=tokens)

"""Continual pretraining with adapters of PEFT: what trains, what comes out, and what is refused."""

import re
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from training.outcomes import assert_same_run, bank_of, moved, weights
from training.tiny_run import (
    END,
    EOS_ID,
    LEAVES,
    AtStep,
    PreparedRun,
    best_at,
    give_held_out_losses,
    interrupted,
    refused,
    tiny_tokenizer,
)
from transformers import AutoModelForCausalLM

from midus_hf.config.errors import install_extra
from midus_hf.models.view import ModelView
from midus_hf.training.adapters import add_adapters, read_adapters
from midus_hf.training.run import run_training

LORA = {"r": 4}


def linear(names) -> set[str]:
    return {name for name in names if name.endswith("_proj.weight")}


@pytest.fixture
def base(upscaled) -> Path:
    return upscaled().parent / "base"


@pytest.fixture
def copies(upscaled) -> Path:
    """A model of LLaMA-Pro: its new layers are copies, without memory."""
    return upscaled("llama", "llama-pro")


def test_adapters_train_linear_layers_and_are_merged(base, config_for, tmp_path):
    run = PreparedRun(config_for(model=base, adapters=LORA, max_steps=4))
    prompt, adapted = torch.tensor([[5, 9, 12, EOS_ID, 7]]), []

    def note(model) -> None:
        with torch.no_grad():
            adapted.append(model.eval()(prompt).logits)

    run.trainer.add_callback(AtStep(4, note, END))
    run.execute()
    assert moved(base, tmp_path / "out") == linear(weights(base))
    with torch.no_grad():
        logits = [AutoModelForCausalLM.from_pretrained(folder)(prompt).logits for folder in (tmp_path / "out", base)]
    torch.testing.assert_close(logits[0], adapted[0], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits[1], adapted[0], atol=1e-2)
    assert not list((tmp_path / "out").glob("adapter*"))


def test_adapters_of_bfloat16_models_are_float32(base, config_for, tmp_path):
    model = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    run = PreparedRun(config_for(model=model, adapters=LORA, bf16=True, max_steps=4))
    training = [value for value in run.trainer.model.parameters() if value.requires_grad]
    assert {value.dtype for value in training} == {torch.float32}
    run.execute()
    assert moved(model, tmp_path / "out") == linear(weights(model))
    assert all(value.dtype == torch.bfloat16 for value in weights(tmp_path / "out").values())


def test_new_parameters_train_whole_with_adapters(upscaled, config_for, tmp_path, capsys):
    model = upscaled("llama")
    options = {"max_steps": 4, "adapters": LORA}
    run_training(config_for(**options))
    new = {key for key in weights(model) if re.search(r"layers\.[14]\.", key)}
    assert moved(model, tmp_path / "out") == linear(weights(model)) | new
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(r"Training adapters on the base, and all new parameters: [\d,]+ of [\d,]+ parameters", printed)
    assert "adapters:\n" in (tmp_path / "out" / "README.md").read_text()

    interrupted(PreparedRun(config_for("parts", **options)), 2)
    assert (tmp_path / "parts" / "checkpoint-2" / "adapter_config.json").exists()
    run_training(config_for("parts", resume_from_checkpoint=True, **options))
    assert_same_run(tmp_path / "parts", tmp_path / "out")
    other = {**options, "adapters": {**LORA, "layers": "all"}}
    with refused(r"adapters is \{.*'layers': 'all'\}, but the run to resume has \{"):
        PreparedRun(config_for("parts", resume_from_checkpoint=True, **other))


def test_the_best_of_a_run_with_adapters_is_merged(base, config_for, corpus, tmp_path, monkeypatch):
    give_held_out_losses(monkeypatch, best_at(4))
    options = {"eval_text": str(corpus), "eval_steps": 2, "save_steps": 2, "save_total_limit": None}
    run_training(config_for(model=base, max_steps=8, load_best_model_at_end=True, adapters={"r": 8}, **options))
    best = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "out" / "checkpoint-4")
    merged, saved = best.merge_and_unload().state_dict(), weights(tmp_path / "out")
    assert all(torch.equal(merged[name], tensor) for name, tensor in saved.items())
    assert moved(base, tmp_path / "out") == linear(weights(base))


def test_blocks_of_a_bank_are_new_and_train_beside_them(blocks_for, fetching, tmp_path, capsys):
    config = blocks_for(trainable="auto", adapters={"r": 4})
    run_training(config)
    assert moved(fetching, tmp_path / "out") == linear(weights(fetching))
    bank = bank_of(tmp_path / "out")
    assert (bank.written(1), bank.written(2)) == ([0, 1], LEAVES)
    assert "; and the blocks of the bank, " in " ".join(capsys.readouterr().out.split())

    options = {"trainable": "auto", "adapters": {"r": 4, "layers": "all"}}
    run_training(blocks_for("all", **options))
    assert not bank_of(tmp_path / "all").written(1)


def test_adapters_can_be_on_all_or_on_named_layers(copies, config_for, tmp_path, capsys):
    every = linear(weights(copies))
    new = {name for name in every if re.search(r"layers\.[25]\.", name)}
    named = {"layers_to_transform": [2, 5], "target_modules": sorted({name.split(".")[-2] for name in every})}
    for name, more, expected in (("all", {}, every), ("new", named, new)):
        run_training(config_for(name, model=copies, max_steps=4, adapters={"r": 4, "layers": "all", **more}))
        assert "Training adapters on all layers: " in capsys.readouterr().out, name
        assert moved(copies, tmp_path / name) == expected
    assert len(new) == 14


OF_ZEROS = "model.layers.2.self_attn.o_proj could not be merged at the end: NaNs detected .* Change the keys"


@pytest.mark.parametrize(
    ("model", "adapters", "message"),
    [
        ("base", {"rank": 4}, r"no option 'adapters\.rank'\. Expected one of"),
        ("base", {"r": "many"}, r"adapters\.r is 'many'; expected a whole number"),
        ("base", {"layers": "old"}, r"adapters\.layers is 'old'; expected base or all"),
        ("base", {"target_modules": ["nothing"]}, "cannot be put on this model: Target modules "),
        ("base", {"layers_pattern": "layers"}, "PEFT refuses the keys of adapters: `layers_pattern`"),
        ("base", {"arrow_config": {}}, "adapters cannot be put on this model: "),
        ("base", {"alora_invocation_tokens": [5]}, "could not be merged at the end: aLoRA does not"),
        ("base", {"lora_bias": True}, "could not be merged at the end: Impossible"),
        ("base", {"inference_mode": True}, "nothing is trained with adapters {'inference_mode': True}; expected"),
        ("copies", {"use_dora": True, "layers": "all"}, OF_ZEROS),
        ("copies", {"use_dora": True, "layers": "all", "layers_to_transform": [2], "target_modules": ["o_proj"]}, OF_ZEROS),
        ("copies", {"use_dora": True}, None),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_adapters_are_refused_before_writing(model, adapters, message, request, config_for, tmp_path):
    """DoRA among it, on new layers whose weights are zero."""
    arguments = config_for(model=request.getfixturevalue(model), adapters=adapters)
    if message is None:
        PreparedRun(arguments)
    else:
        with refused(message):
            PreparedRun(arguments)
        assert not (tmp_path / "out").exists()


def test_mamba_modules_are_refused_for_hosted_types(upscaled):
    model = AutoModelForCausalLM.from_pretrained(upscaled("llama"))
    model.model.layers[0].self_attn.out_proj = torch.nn.Linear(32, 32)
    model.config.model_type = "midus_falcon_h1"
    with refused("'out_proj' is incompatible with Mamba-based models"):
        add_adapters(ModelView(model), {"layers": "all", "target_modules": ["out_proj"]})


def test_adapter_defaults_and_missing_peft_is_named(base, config_for, without):
    config, trains_new = read_adapters({})
    assert (config.r, config.lora_alpha, config.target_modules) == (16, 32, "all-linear")
    assert config.task_type == "CAUSAL_LM"
    assert trains_new
    without("peft")
    with refused(re.escape(f"need peft, not installed; {install_extra('train')}, or leave")):
        PreparedRun(config_for(model=base, adapters={}))

"""Continual pretraining with adapters of PEFT: what trains, what comes out, and what is refused."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from pairs import by_default
from peft import PeftModel
from tiny import save_tiny_model
from training.block_runs import LEAVES, bank_of
from training.outcomes import assert_same_run, moved, weights
from training.steered_runs import END, AtStep, interrupted
from training.tiny_run import EOS_ID, best_at, give_held_out_losses, refused, tiny_tokenizer
from transformers import AutoModelForCausalLM

from midus_hf.config.wording import install_extra
from midus_hf.training.adapters import add_adapters, read_adapters
from midus_hf.training.run import prepare, train
from upscalers.runs.upscale import upscale

METHODS = {
    "lora": {"r": 4},
    "dora": {"method": "lora", "r": 4, "use_dora": True},
    "osf": {"method": "osf", "effective_rank": 0.5},
    "vera": {"method": "vera", "r": 8},
    "hra": {"method": "hra", "r": 4},
    "oft": {"method": "oft", "oft_block_size": 8, "r": 0},
    "ia3": {"method": "ia3"},
}


def linear(names) -> set[str]:
    return {name for name in names if name.endswith("_proj.weight")}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = save_tiny_model("llama", tmp_path_factory.mktemp("base") / "base")
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def copies(base, tmp_path_factory) -> Path:
    """A model of LLaMA-Pro: its new layers are copies, without memory."""
    folder = tmp_path_factory.mktemp("copies") / "model"
    upscale(base=base, method="llama-pro", output=folder, num_new_layers=2, verify=False)
    return folder


@pytest.mark.parametrize("name", by_default(["lora", "osf", "ia3"], METHODS))
def test_every_method_trains_the_linear_layers_resumes_and_is_merged(name, base, config_for, corpus, tmp_path):
    options = {"adapters": METHODS[name], "max_steps": 4, "eval_text": str(corpus), "eval_steps": 2}
    train(config_for("whole", model=base, **options))
    changed = moved(base, tmp_path / "whole")
    expected = linear(weights(base))
    if name == "ia3":
        expected = {name for name in expected if re.search("[kv]_proj|down_proj", name)}
    assert changed == expected
    interrupted(prepare(config_for("parts", model=base, **options)), 2)
    train(config_for("parts", model=base, resume_from_checkpoint=True, **options))
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_the_merged_model_computes_what_the_adapted_one_did(base, config_for, tmp_path):
    run = prepare(config_for(model=base, max_steps=4, adapters=METHODS["osf"]))
    prompt = torch.tensor([[5, 9, 12, EOS_ID, 7]])
    adapted = []

    def note(model) -> None:
        with torch.no_grad():
            adapted.append(model.eval()(prompt).logits)

    run.trainer.add_callback(AtStep(4, note, END))
    run.execute()
    with torch.no_grad():
        logits = [AutoModelForCausalLM.from_pretrained(folder)(prompt).logits for folder in (tmp_path / "out", base)]
    torch.testing.assert_close(logits[0], adapted[0], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits[1], adapted[0], atol=1e-2)
    assert not list((tmp_path / "out").glob("adapter*"))


def test_osf_keeps_the_largest_singular_directions_from_gradients(base):
    adapted, _ = add_adapters(AutoModelForCausalLM.from_pretrained(base), METHODS["osf"])
    prompt = torch.tensor([[5, 9, 12, 7]])
    adapted(input_ids=prompt, labels=prompt).loss.backward()
    layer = (
        adapted.get_base_model().model.layers[0].mlp.gate_proj
    )  # [48, 32]: what is left of V is orthogonal to what is kept
    left = layer._osf_V_low_init["default"]
    gradient = layer.osf_svd_params["default"]["V_low"].grad
    torch.testing.assert_close(gradient @ left.T @ left, gradient)
    assert gradient.any() and left.shape == (16, 32)


@pytest.mark.parametrize("name", ["lora", "osf"])
def test_of_a_model_in_bfloat16_adapters_are_held_in_float32(name, base, config_for, tmp_path):
    model = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    options = {"adapters": METHODS[name], "bf16": True, "max_steps": 4}
    run = prepare(config_for(model=model, **options))
    training = [value for value in run.trainer.model.parameters() if value.requires_grad]
    assert training and all(value.dtype == torch.float32 for value in training)
    run.execute()
    assert moved(model, tmp_path / "out") == linear(weights(model))
    assert all(value.dtype == torch.bfloat16 for value in weights(tmp_path / "out").values())


@pytest.mark.parametrize("name", ["lora", "osf"])
def test_what_is_new_in_an_upscaled_model_trains_whole_beside_them(name, upscaled, config_for, tmp_path, capsys):
    model = upscaled("llama")
    options = {"max_steps": 4, "adapters": METHODS[name]}
    train(config_for(**options))
    new = {key for key in weights(model) if re.search(r"layers\.[14]\.", key)}
    assert moved(model, tmp_path / "out") == linear(weights(model)) | new
    said = " ".join(capsys.readouterr().out.split())
    assert f"Training adapters of method {name} on the base, and what is new in the model whole: " in said
    assert re.search(r"whole: [\d,]+ of [\d,]+ parameters", said)
    assert "adapters:\n" in (tmp_path / "out" / "README.md").read_text()

    interrupted(prepare(config_for("parts", **options)), 2)
    assert (tmp_path / "parts" / "checkpoint-2" / "adapter_config.json").exists()
    train(config_for("parts", resume_from_checkpoint=True, **options))
    assert_same_run(tmp_path / "parts", tmp_path / "out")
    other = {**options, "adapters": {**METHODS[name], "layers": "all"}}
    with refused(r"adapters is \{.*'layers': 'all'\}, but the run to resume has \{"):
        prepare(config_for("parts", resume_from_checkpoint=True, **other))


def test_the_best_of_a_run_with_adapters_is_merged(base, config_for, corpus, tmp_path, monkeypatch):
    give_held_out_losses(monkeypatch, best_at(4))
    options = {"eval_text": str(corpus), "eval_steps": 2, "save_steps": 2, "save_total_limit": None}
    train(config_for(model=base, max_steps=8, load_best_model_at_end=True, adapters={"r": 8}, **options))
    best = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "out" / "checkpoint-4")
    merged, saved = best.merge_and_unload().state_dict(), weights(tmp_path / "out")
    assert all(torch.equal(merged[name], tensor) for name, tensor in saved.items())
    assert moved(base, tmp_path / "out") == linear(weights(base))


def test_blocks_of_a_bank_are_new_and_train_beside_them(blocks_for, models, tmp_path, capsys):
    config = blocks_for(trainable="auto", adapters={"r": 4})
    train(config)
    assert moved(models / "hier-ffn", tmp_path / "out") == linear(weights(models / "hier-ffn"))
    bank = bank_of(tmp_path / "out")
    assert (bank.written(1), bank.written(2)) == ([0, 1], LEAVES)
    assert "; and the blocks of the bank, " in " ".join(capsys.readouterr().out.split())

    options = {"trainable": "auto", "adapters": {"r": 4, "layers": "all"}}
    train(blocks_for("all", **options))
    assert not bank_of(tmp_path / "all").written(1)


def test_they_may_be_on_all_layers_or_on_those_that_peft_is_given(copies, config_for, tmp_path, capsys):
    every = linear(weights(copies))
    new = {name for name in every if re.search(r"layers\.[25]\.", name)}
    named = {"layers_to_transform": [2, 5], "target_modules": sorted({name.split(".")[-2] for name in every})}
    for name, more, expected in (("all", {}, every), ("new", named, new)):
        train(config_for(name, model=copies, max_steps=4, adapters={"r": 4, "layers": "all", **more}))
        assert "Training adapters of method lora on all layers: " in capsys.readouterr().out
        assert moved(copies, tmp_path / name) == expected
    assert len(new) == 14


def test_defaults_are_those_of_the_short_form_and_numbers_without_a_point_are_numbers():
    config, _ = read_adapters({})
    assert (config.r, config.lora_alpha, config.target_modules, config.task_type) == (
        16,
        32,
        "all-linear",
        "CAUSAL_LM",
    )
    config, _ = read_adapters({"method": "vera", "d_initial": "1e-2", "r": "8e0"})
    assert (config.d_initial, config.r) == (0.01, 8)
    assert read_adapters({"method": "ia3"})[0].target_modules is None


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        ({"method": "lorra"}, "does not have. Did you mean 'lora'"),
        ({"method": 3}, "adapters.method is 3, which PEFT "),
        ({"rank": 4}, "config has no option 'adapters.rank'. Did you mean "),
        (
            {"method": "osf", "efective_rank": 4},
            "config has no option 'adapters.efective_rank'. Did you mean 'effective_rank'",
        ),
        ({"r": "many"}, "adapters.r is 'many'; expected a whole number."),
        ({"layers": "old"}, "adapters.layers is 'old'; expected base or all."),
        (
            {"method": "prompt_tuning"},
            "adapters.method is 'prompt_tuning', whose result cannot be merged into the weights, as the result of a run is (it "
            "changes no weights); expected one that changes weights, such as lora or osf.",
        ),
        (
            {"method": "adalora"},
            "adapters.method is 'adalora', whose ranks are allotted by a call after every step, which the Trainer does not make; "
            "expected another, such as lora.",
        ),
        (
            {"method": "beft"},
            "(Base layer has no bias, cannot merge bias adapter default); expected one that changes weights",
        ),
        ({"target_modules": ["nothing"]}, "adapters of method 'lora' cannot be put on this model: Target modules "),
        ({"method": "miss"}, "adapters of method 'miss' cannot be put on this model: `r` (64) must be less than"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(adapters, message, base, config_for, tmp_path):
    with refused(re.escape(message)):
        prepare(config_for(model=base, adapters=adapters))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "adapters", "message"),
    [
        (
            "memory",
            {"method": "trainable_tokens", "token_indices": [3]},
            "adapters.method is 'trainable_tokens', beside which PEFT trains no layer whole, but the new parts of this "
            "midus_llama model must train whole; expected another method, or adapters.layers: all.",
        ),
        *(
            (
                "copies",
                {"layers": "all", **adapters},
                f"adapters.method is {method!r}, which with these options cannot train model.layers.2.self_attn.o_proj, "
                "whose weights are zero at first; expected one that adds to weights, such as osf or lora without use_dora, or",
            )
            for method, adapters in (("oft", METHODS["oft"]), ("lora", {"use_dora": True}))
        ),
    ],
)
def test_what_new_layers_cannot_have_is_refused(kind, adapters, message, upscaled, copies, config_for):
    with refused(re.escape(message)):
        prepare(config_for(model=copies if kind == "copies" else upscaled("llama"), adapters=adapters))


def test_modules_that_mamba_reads_by_itself_are_refused_for_our_types_too(upscaled):
    model = AutoModelForCausalLM.from_pretrained(upscaled("llama"))
    model.model.layers[0].self_attn.out_proj = torch.nn.Linear(32, 32)
    model.config.model_type = "midus_falcon_h1"
    with refused("cannot be put on this model: .*'out_proj' is incompatible with Mamba-based models"):
        add_adapters(model, {"layers": "all", "target_modules": ["out_proj"]})


def test_without_peft_it_is_named(base, config_for, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else find(name))
    message = f"adapters need peft, which is not installed; {install_extra('train')}, or leave adapters out."
    with refused(re.escape(message)):
        prepare(config_for(model=base, adapters={}))

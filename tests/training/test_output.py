"""A trained model carries what it needs to be shared; what cannot be written or is not finite costs no weights."""

import json
import math
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import requests
import torch
import yaml
from safetensors.torch import load_file
from training.outcomes import weights
from training.tiny_run import AFTER, AtStep, PreparedRun, give_held_out_losses, tiny_config
from transformers import AutoModelForCausalLM, TrainerState, TrainingArguments

from midus_hf.cli.train import main
from midus_hf.files.checkpoint_files import TERMS
from midus_hf.sources.downloads import DownloadError
from midus_hf.training import output, prepare
from midus_hf.training.optim import cast_for_training
from midus_hf.training.output import PartialSaveError, add_training
from midus_hf.training.run import TrainingError, run_training
from midus_hf.training.trainer import MemoryTrainer, NotFiniteError, first_not_finite

FULL_DISK = OSError(28, "No space left on device")
CARD = "---\ntags:\n- upscaled\n---\n\n# A model\n\nWhat it is: ü.\n\n"


@pytest.fixture
def model(upscaled, tmp_path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(upscaled("llama"), folder)
    measured = CARD.replace("---\n\n", "model-index:\n- name: of the base\n  results: []\n---\n\n")
    (folder / "README.md").write_text(measured, encoding="utf-8")  # which no longer holds once the model is trained
    (folder / "LICENSE.txt").write_bytes(b"terms")
    (folder / "NOTICE").write_bytes(b"notice")
    return folder


def training_section(folder: Path) -> str:
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert card.startswith(CARD.rstrip() + "\n\n## Trained with\n")
    return card.partition("## Trained with")[2]


def test_its_card_says_how_it_was_trained(model, config_for, corpus, tmp_path, monkeypatch):
    give_held_out_losses(monkeypatch, lambda step: 3.0 - step / 4)
    measured = {"eval_text": {"a": str(corpus)}, "eval_on_start": True, "eval_steps": 3}
    result = run_training(config_for(model=model, max_steps=3, learning_rate=1e-3, **measured))
    section = training_section(tmp_path / "out")
    assert "| a | 3.0000 | 2.2500 | 20.0855 | 9.4877 |\n" in section
    assert "save_" not in section
    assert "eval_strategy" not in section
    assert f"| steps | tokens | final loss |\n|---|---|---|\n| 3 | 96 | {result.loss:.4f} |\n" in section
    options = re.search(r"```yaml\n(.*)```\n$", section, flags=re.DOTALL)[1]
    report, arguments = yaml.safe_load(options), yaml.safe_load((tmp_path / "out" / "train_config.yaml").read_text())
    assert arguments.pop("sequences_per_step") == 2
    names = ("model_name_or_path", "output_dir", "corpus", "eval_text")
    assert [report.pop(name) for name in names] == [model.name, "out", corpus.name, {"a": corpus.name}]
    assert arguments == {**report, **{name: arguments[name] for name in names}}
    assert report["learning_rate"] == 1e-3
    assert str(tmp_path) not in section


def test_files_deleted_during_training_are_saved(model, config_for, tmp_path, monkeypatch):
    (model / "README.md").unlink()
    names = ("LICENSE.txt", "NOTICE", "upscale.json")
    contents = [(model / name).read_bytes() for name in names]
    train = MemoryTrainer.train
    monkeypatch.setattr(MemoryTrainer, "train", lambda *given: shutil.rmtree(model) or train(*given))
    run_training(config_for(model=model, max_steps=1))
    assert [(tmp_path / "out" / name).read_bytes() for name in names] == contents
    assert not (tmp_path / "out" / "README.md").exists()


def test_card_has_held_out_losses_before_and_after(tmp_path):
    def card(losses, **keys):
        keys = {"eval_text": {"a": "held.txt", "b": "held.txt"}, "eval_steps": 1, "save_steps": 1, **keys}
        events = [
            {"step": step, f"eval_{name}_loss": loss, f"eval_{name}_perplexity": math.exp(loss)}
            for step, loss in losses.items()
            for name in "ab"
        ]
        state = TrainerState(global_step=2, best_global_step=0, log_history=events, num_input_tokens_seen=1_000)
        state.best_model_checkpoint = str(tmp_path / "checkpoint-1")
        return add_training("# A model", tiny_config(tmp_path, tmp_path, tmp_path, **keys), state)

    both = card({0: 3.0, 1: 2.0, 2: 2.5})
    assert all(f"| {name} | 3.0000 | 2.5000 | 20.0855 | 12.1825 |\n" in both for name in "ab")
    assert "| 2 | 1,000 | not logged |" in both
    assert "| b | not measured | 2.5000 | not measured | 12.1825 |\n" in card({2: 2.5})
    best = card({0: 3.0, 1: 2.0, 2: 2.5}, load_best_model_at_end=True)
    assert "| a | 3.0000 | 2.0000 | " in best, "the loss of the model that is saved"


def test_example_on_the_card_of_a_new_model_runs(corpus, upscaled, tmp_path, monkeypatch, capsys):
    base = str(upscaled("llama").parent / "base")
    run_training(tiny_config(None, corpus, tmp_path / "out", config_name=base, tokenizer_name=base, max_steps=1))
    monkeypatch.chdir(tmp_path / "out")
    exec(Path("README.md").read_text().split("```python\n")[1].split("```")[0], {})
    assert len(capsys.readouterr().out.split("\n")[-2].split()) > 20


def test_only_accompanying_files_are_fetched_from_the_hub(tmp_path, monkeypatch, capsys):
    download = Mock(side_effect=[str(tmp_path), OSError("it cannot be reached")])
    monkeypatch.setattr(prepare, "snapshot_download", download)
    monkeypatch.setattr(prepare, "load_model", lambda *_, **__: ("model", []))
    arguments = SimpleNamespace(attn_implementation=None, model_name_or_path="owner/name", config_name=None)
    for name in ("README.md", "LICENSE", "USE_POLICY.md", "config.json"):
        (tmp_path / name).write_text(name)
    accompanying = {name: name.encode() for name in ("README.md", "LICENSE", "USE_POLICY.md")}
    assert prepare.load_for_training(arguments, None) == ("model", accompanying)
    download.assert_called_once_with("owner/name", allow_patterns=["upscale.json", "README.md", *TERMS])
    assert not capsys.readouterr().err
    assert prepare.load_for_training(arguments, None) == ("model", {})
    said = "the card and terms of owner/name were not fetched, and are not saved with the model: it cannot be reached"
    assert said in capsys.readouterr().err


def test_inconsistent_generation_config_is_kept(model, config_for, tmp_path):
    card = "---\nlicense: mit\n---\n# Modèle français\n".encode("latin-1")
    (model / "README.md").write_bytes(card)
    values = {"eos_token_id": 2, "temperature": 0.9, "top_p": 0.6}  # of sampling, without do_sample
    (model / "generation_config.json").write_text(json.dumps(values))
    run = PreparedRun(config_for(model=model, max_steps=1))
    run.model.generation_config.eos_token_id = [2, 7]  # a change, as fine-tuning makes it
    run.execute()
    assert (tmp_path / "out" / "README.md").read_bytes().startswith(card + b"\n## Trained with\n")
    saved = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert saved | values | {"eos_token_id": [2, 7]} == saved
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config.eos_token_id == [2, 7]


def test_failed_files_are_named_and_the_model_loads(words, model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", Mock(side_effect=FULL_DISK))
    assert main([*words, f"--model_name_or_path={model}", "--max_steps=1"]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"is in {tmp_path / 'out'}, but without the tokenizer (" in line
    assert f"copy what is missing from {model}." in line
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert "## Trained with" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert not (tmp_path / "out" / ".partial_model").exists()


def test_a_model_that_cannot_be_moved_stays_where_it_was_written(config_for, tmp_path, monkeypatch):
    replace = os.replace

    def fail(source, target):
        if Path(target) == tmp_path / "out" / "model.safetensors":
            raise OSError(5, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(
        PartialSaveError, match=r"is in .*\.partial_model, and could not be moved to .*out: .*output error"
    ):
        run_training(config_for(max_steps=1))
    AutoModelForCausalLM.from_pretrained(tmp_path / "out" / ".partial_model")


def test_a_model_that_cannot_be_uploaded_is_saved(config_for, tmp_path, monkeypatch):
    made = "transformers.Trainer.init_hf_repo"
    monkeypatch.setattr(made, lambda self, token=None: setattr(self, "hub_model_id", "me/x"))
    with pytest.raises(PartialSaveError, match=r"could not be uploaded: .*Upload it by: hf upload me/x"):
        run_training(config_for(max_steps=1, push_to_hub=True, hub_model_id="me/x"))
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_unwritten_weights_leave_no_model_but_a_checkpoint(config_for, tmp_path, monkeypatch):
    run = PreparedRun(config_for(max_steps=2, save_steps=1))
    write_model = run.trainer.write_model

    def fail(folder, _internal_call=False):
        write_model(folder, _internal_call)
        if not _internal_call:  # of the trained model, not of a checkpoint
            raise FULL_DISK

    monkeypatch.setattr(run.trainer, "write_model", fail)
    with pytest.raises(
        PartialSaveError, match=r"could not be written: No space.*resume_from_checkpoint true .*checkpoint-2"
    ):
        run.execute()
    assert not (tmp_path / "out" / "config.json").exists()
    assert not (tmp_path / "out" / ".partial_model").exists()
    assert run_training(config_for(max_steps=2, save_steps=1, resume_from_checkpoint=True)).steps == 2
    state = TrainerState.load_from_json(str(tmp_path / "out" / "trainer_state.json"))
    assert state.global_step == 2
    assert (tmp_path / "out" / "config.json").is_file()


def test_failed_step_raises_and_nonfinite_exits_with_1(words, monkeypatch, tmp_path, capsys):
    step = Mock(side_effect=[ValueError("broken inside"), NotFiniteError("gradient norm is inf", 4)])
    monkeypatch.setattr("midus_hf.training.trainer.MemoryTrainer.training_step", step)
    with pytest.raises(TrainingError, match=r"^step 1 failed: broken inside\. To continue, start the run again\.$"):
        main(words)
    assert main(words) == 1
    assert "midus train: gradient norm is inf at step 4; expected" in capsys.readouterr().err
    assert not (tmp_path / "out" / "config.json").exists()


def test_broken_stream_ends_with_the_way_to_continue(words, monkeypatch, capsys):
    step = Mock(side_effect=DownloadError("the connection broke"))
    monkeypatch.setattr("midus_hf.training.trainer.MemoryTrainer.training_step", step)
    assert main(words) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "midus train: step 1 failed: the connection broke. To continue, start the run again."


def test_broken_upload_keeps_the_model(tmp_path, monkeypatch):
    broken = Mock(side_effect=requests.exceptions.ConnectionError("cut"))
    monkeypatch.setattr(output, "upload_folder", broken)
    with pytest.raises(
        PartialSaveError, match=r"is in .*, and could not be uploaded: cut\. Upload it by: hf upload me/x"
    ):
        output.upload_model("me/x", tmp_path, None)


def of_gradient(value):
    def spoil(model):
        parameter = next(parameter for parameter in model.parameters() if parameter.requires_grad)

        return parameter.register_hook(
            lambda gradient: gradient.flatten().index_fill(0, torch.tensor([0]), value).view_as(gradient)
        )

    return spoil


@pytest.mark.parametrize(
    ("value", "step", "changes"),
    [
        (math.inf, 4, {}),  # that saves
        (math.inf, 5, {"max_steps": 5}),  # the last
        (math.nan, 3, {"max_grad_norm": 0.0}),
        (-math.inf, 4, {"logging_steps": 5, "gradient_accumulation_steps": 2, "trainable": "all"}),
    ],
)
def test_a_gradient_that_is_not_finite_ends_the_run(value, step, changes, config_for, tmp_path):
    options = {"max_steps": 6, "save_steps": 2, "save_total_limit": None, **changes}
    run = PreparedRun(config_for(**options))
    run.trainer.add_callback(AtStep(step, of_gradient(value), "on_step_begin"))
    with pytest.raises(NotFiniteError, match=rf"norm is (inf|nan) at step {step}; .* Lower the learning rates"):
        run.execute()
    whole = [f"checkpoint-{saved}" for saved in range(2, step, 2)]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [*whole, "train_config.yaml"]
    saved = [load_file(tmp_path / "out" / name / "trained.safetensors").values() for name in whole]
    assert all(tensor.isfinite().all() for tensors in saved for tensor in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_finite_number_is_finite(dtype):
    largest = torch.full([1000], torch.finfo(dtype).max, dtype=dtype)
    named = [("empty", torch.empty(0)), ("whole", torch.ones(3, dtype=torch.int64)), ("a", largest), ("b", -largest)]
    assert first_not_finite(named) is None
    assert first_not_finite([]) is None
    assert first_not_finite([*named, ("c", -2 * largest)]) == "c holds inf"
    assert first_not_finite([("c", torch.tensor([math.nan, math.inf])), *named]) == "c holds nan"


Q_PROJ = "model.layers.4.self_attn.q_proj.weight"


def of_block(run, monkeypatch):
    (bank,) = run.trainer.blocks.banks
    return lambda model: bank._values(bank.touched()[0]).__setitem__(5, math.nan)


def of_weight(value, dtype=None):
    """Return what makes for a run what spoils a weight, which is saved in a dtype."""

    def spoil(run, monkeypatch):
        cast, saved = cast_for_training, {} if dtype is None else {Q_PROJ: dtype}
        monkeypatch.setattr("midus_hf.training.prepare.cast_for_training", lambda *given: cast(*given) | saved)
        return lambda model: model.get_parameter(Q_PROJ).data[1].fill_(value)

    return spoil


@pytest.mark.parametrize(
    ("fixture", "save_steps", "spoil", "message"),
    [
        ("config_for", 2, of_weight(math.nan), r"layers\.4\.self_attn\.q_proj\.weight holds nan at step 4"),
        ("config_for", None, of_weight(math.inf), r"layers\.4\.self_attn\.q_proj\.weight holds inf at step 4"),
        ("config_for", None, of_weight(1e6, torch.float16), r"q_proj\.weight holds inf at step 4"),  # that cannot hold it
        ("blocks_for", 2, of_block, r"block \d+ of level \d holds nan at step 4"),
    ],
    ids=["checkpoint", "model", "dtype-of-the-model", "blocks"],
)  # fmt: skip
def test_tensors_that_are_not_finite_are_never_saved(
    fixture, save_steps, spoil, message, request, monkeypatch, tmp_path
):
    run = PreparedRun(request.getfixturevalue(fixture)(max_steps=4, save_steps=save_steps))
    run.trainer.add_callback(AtStep(4, spoil(run, monkeypatch), AFTER))
    with pytest.raises(NotFiniteError, match=message):
        run.execute()
    left = [path.name for path in tmp_path.glob("out/*") if path.name != "train_config.yaml"]
    assert left == (["checkpoint-2"] if save_steps else [])


def test_what_is_frozen_may_be_what_it_is(config_for, tmp_path):
    run = PreparedRun(config_for(max_steps=1))
    run.execute()
    names = ("model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight")
    frozen, trained = map(run.model.get_parameter, names)
    frozen.data[2] = math.inf
    run.trainer.save_model(str(tmp_path / "saved"))
    assert weights(tmp_path / "saved")[names[0]][2].isinf().all()
    trained.data[2] = math.inf
    with pytest.raises(NotFiniteError):
        run.trainer.save_model(str(tmp_path / "saved"))


def test_what_a_scaler_of_gradients_leaves_out_is_left_to_it(upscaled, tmp_path):
    """It takes infinite gradients for a scale that is too large, and lowers that; a loss that is not finite ends the run."""
    model = AutoModelForCausalLM.from_pretrained(upscaled("llama"))
    trainer = MemoryTrainer(model, TrainingArguments(str(tmp_path / "out"), report_to="none", use_cpu=True))
    (parameter,) = torch.nn.Linear(1, 1, bias=False).parameters()

    def norm(loss: float = 1.0) -> float:
        parameter.grad, trainer._tr_loss = torch.full((1, 1), math.inf), torch.tensor(loss)
        return trainer.clip_gradients([parameter], 1.0).item()

    with pytest.raises(NotFiniteError, match="gradient norm is inf at step 1"):
        norm()
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
    assert norm() == math.inf
    with pytest.raises(NotFiniteError, match=r"loss is nan at step 1; .* '--debug underflow_overflow'"):
        norm(math.nan)
    model.lm_head.weight.data[0, 0] = math.inf
    with pytest.raises(NotFiniteError, match=r"loss is nan, and [\w.]+ holds inf, at step 1"):
        norm(math.nan)

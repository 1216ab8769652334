"""A trained model carries what it needs to be shared, with a card; what cannot be written at the end of a run costs no weights."""

import json
import math
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import yaml
from training.tiny_run import PreparedRun, give_held_out_losses, tiny_config
from transformers import AutoModelForCausalLM, TrainerState

from midus_hf.cli.train import main
from midus_hf.files.checkpoint_files import TERMS
from midus_hf.training import inputs
from midus_hf.training.output import PartialSaveError, add_training
from midus_hf.training.run import TrainingError, run_training
from midus_hf.training.trainer import MemoryTrainer, NotFiniteError

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
    assert "save_" not in section and "eval_strategy" not in section
    assert f"| steps | tokens | final loss |\n|---|---|---|\n| 3 | 96 | {result.loss:.4f} |\n" in section
    options = re.search(r"```yaml\n(.*)```\n$", section, flags=re.DOTALL)[1]
    report, arguments = yaml.safe_load(options), yaml.safe_load((tmp_path / "out" / "train_config.yaml").read_text())
    assert arguments.pop("sequences_per_step") == 2
    names = ("model_name_or_path", "output_dir", "corpus", "eval_text")
    assert [report.pop(name) for name in names] == [model.name, "out", corpus.name, {"a": corpus.name}]
    assert arguments == {**report, **{name: arguments[name] for name in names}} and report["learning_rate"] == 1e-3
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
        return add_training(b"# A model", tiny_config(tmp_path, tmp_path, tmp_path, **keys), state).decode()

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


def test_only_accompanying_files_are_fetched_from_the_hub(tmp_path, monkeypatch):
    download = Mock(side_effect=[str(tmp_path), OSError("it cannot be reached")])
    monkeypatch.setattr(inputs, "snapshot_download", download)
    monkeypatch.setattr(inputs, "load_model", lambda *_, **__: ("model", []))
    arguments = SimpleNamespace(attn_implementation=None, model_name_or_path="owner/name", config_name=None)
    for name in ("README.md", "LICENSE", "USE_POLICY.md", "config.json"):
        (tmp_path / name).write_text(name)
    accompanying = {name: name.encode() for name in ("README.md", "LICENSE", "USE_POLICY.md")}
    assert inputs.load_for_training(arguments, None) == ("model", accompanying)
    download.assert_called_once_with("owner/name", allow_patterns=["upscale.json", "README.md", *TERMS])
    assert inputs.load_for_training(arguments, None) == ("model", {})


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
    assert (
        f"is in {tmp_path / 'out'}, but without the tokenizer (" in line
        and f"copy what is missing from {model}." in line
    )
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
    assert not (tmp_path / "out" / "config.json").exists() and not (tmp_path / "out" / ".partial_model").exists()
    assert run_training(config_for(max_steps=2, save_steps=1, resume_from_checkpoint=True)).steps == 2
    state = TrainerState.load_from_json(str(tmp_path / "out" / "trainer_state.json"))
    assert state.global_step == 2 and (tmp_path / "out" / "config.json").is_file()


def test_failed_step_raises_and_nonfinite_exits_with_1(words, monkeypatch, tmp_path, capsys):
    step = Mock(side_effect=[ValueError("broken inside"), NotFiniteError("gradient norm is inf", 4)])
    monkeypatch.setattr("midus_hf.training.trainer.MemoryTrainer.training_step", step)
    with pytest.raises(TrainingError, match=r"^step 1 failed: broken inside\. To continue, start the run again\.$"):
        main(words)
    assert main(words) == 1
    assert "midus train: gradient norm is inf at step 4; expected" in capsys.readouterr().err
    assert not (tmp_path / "out" / "config.json").exists()

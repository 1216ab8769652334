"""What is written at the end of a run, and fails, costs no weights."""

import json
import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
from training.tiny_run import PreparedRun
from transformers import AutoModelForCausalLM, TrainerState

from midus_hf.cli.train import main
from midus_hf.training.output import PartialSaveError
from midus_hf.training.run import TrainingError, run_training
from midus_hf.training.trainer import NotFiniteError

FULL_DISK = OSError(28, "No space left on device")
CARD = "---\nlicense: mit\n---\n# Modèle français\n"


@pytest.fixture
def model(upscaled, tmp_path) -> Path:
    """An upscaled model that a test may change."""
    return shutil.copytree(upscaled("llama"), tmp_path / "model")


def test_inconsistent_generation_config_is_kept(model, config_for, tmp_path):
    card = CARD.encode("latin-1")
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
    (model / "README.md").write_text(CARD, encoding="utf-8")
    assert main([*words, f"--model_name_or_path={model}", "--max_steps=1"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"midus train: the trained model is in {tmp_path / 'out'}, but without the tokenizer (OSError: [Errno 28] No space left on "
        f"device); copy what is missing from {model}."
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
        PartialSaveError,
        match=r"the trained model is in .*\.partial_model, and could not be moved to .*out: .*output error",
    ):
        run_training(config_for(max_steps=1))
    AutoModelForCausalLM.from_pretrained(tmp_path / "out" / ".partial_model")


def test_a_model_that_cannot_be_uploaded_is_saved(config_for, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "transformers.Trainer.init_hf_repo", lambda self, token=None: setattr(self, "hub_model_id", "me/x")
    )
    with pytest.raises(PartialSaveError, match=r"could not be uploaded: .*offline.*Upload it by: hf upload me/x"):
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
        PartialSaveError,
        match=r"partial_model could not be written: No space left.*resume_from_checkpoint true .*checkpoint-2",
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

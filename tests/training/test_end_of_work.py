"""What is written at the end of a run is tried before its first step, and what fails all the same costs no weights."""

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from training.outcomes import weights
from training.tiny_run import refused, tiny_tokenizer
from transformers import AutoModelForCausalLM, TrainerState

from midus_hf.cli.train import main
from midus_hf.training import saving
from midus_hf.training.run import TrainingRun, train
from midus_hf.training.saving import SavedInPart, bytes_of_weights


@pytest.fixture
def model(upscaled, tmp_path) -> Path:
    """An upscaled model that a test may change."""
    return shutil.copytree(upscaled("llama"), tmp_path / "model")


GENERATION = {
    "sampling without do_sample": {"eos_token_id": 2, "temperature": 0.9, "top_p": 0.6},
    "a penalty without beams": {"eos_token_id": 2, "length_penalty": 0.8},
}


@pytest.mark.parametrize("values", GENERATION.values(), ids=GENERATION)
def test_settings_of_generation_that_contradict_one_another_are_saved_as_they_came(
    values, model, config_for, tmp_path, capsys
):
    (model / "generation_config.json").write_text(json.dumps(values))
    run = TrainingRun(config_for(model=model, max_steps=1))
    said = capsys.readouterr().err
    assert said.startswith("the model's generation_config.json contradicts itself, and is saved as it is: ")
    run.model.generation_config.eos_token_id = [2, 7]  # a change, as fine-tuning makes it
    run.execute()
    saved = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert saved | values | {"eos_token_id": [2, 7]} == saved
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config.eos_token_id == [2, 7]


CARD = "---\nlicense: mit\n---\n# Modèle français\n"


def test_a_card_that_is_no_utf8_keeps_its_bytes(model, config_for, tmp_path):
    (model / "README.md").write_bytes(CARD.encode("latin-1"))
    train(config_for(model=model, max_steps=1))
    saved = (tmp_path / "out" / "README.md").read_bytes()
    assert saved.startswith(CARD.encode("latin-1") + b"\n## Trained with\n")


def test_a_tokenizer_that_cannot_be_saved_is_refused_before_training(config_for, tmp_path, monkeypatch):
    def fail(self, folder, **_):
        raise TypeError("Object of type date is not JSON serializable")

    monkeypatch.setattr(type(tiny_tokenizer()), "save_pretrained", fail)
    with refused(
        r"model_name_or_path is '.*', of which the trained model cannot have the tokenizer \(TypeError: Object of type"
    ):
        TrainingRun(config_for(max_steps=1))
    assert not (tmp_path / "out").exists()


def test_a_hub_that_cannot_be_reached_is_refused_before_training(config_for, tmp_path):
    with refused("push_to_hub is true, and the Trainer makes a repository: the Hub cannot be asked .*offline"):
        TrainingRun(config_for(max_steps=1, push_to_hub=True, hub_model_id="me/x"))
    assert not (tmp_path / "out").exists()


Usage = namedtuple("Usage", "total used free")


def test_a_disk_without_room_for_the_model_is_refused_before_training(config_for, upscaled, tmp_path, monkeypatch):
    size = sum(tensor.nbytes for tensor in weights(upscaled("llama")).values())
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda path: Usage(size, 0, size - 1))
    with refused(
        r"output_dir is '.*out', whose disk has 0\.\d+ GB free, and the trained model takes 0\.\d+ GB; free some"
    ):
        TrainingRun(config_for(max_steps=1))
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda path: Usage(size, 0, size))
    assert train(config_for(max_steps=1)).steps == 1


def test_the_blocks_of_a_bank_need_room_too(blocks_for, fetching, tmp_path):
    run = TrainingRun(blocks_for())
    own = sum(tensor.nbytes for tensor in weights(fetching).values())
    assert bytes_of_weights(run) > own
    run.execute()


def test_files_that_fail_at_the_end_leave_a_model_that_loads_and_are_named(
    words, model, tmp_path, monkeypatch, capsys
):
    def fail(self, folder, **_):
        raise OSError(28, "No space left on device")

    begin = TrainingRun.execute

    def execute(run):
        monkeypatch.setattr(type(run.tokenizer), "save_pretrained", fail)
        return begin(run)

    monkeypatch.setattr(TrainingRun, "execute", execute)
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
    def fail(*args, **kwargs):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(saving, "_move_into_place", fail)
    with pytest.raises(
        SavedInPart,
        match=r"the trained model is in .*\.partial_model, and could not be moved to .*out: .*output error",
    ):
        train(config_for(max_steps=1))
    AutoModelForCausalLM.from_pretrained(tmp_path / "out" / ".partial_model")


def test_a_model_that_cannot_be_uploaded_is_saved(config_for, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "transformers.Trainer.init_hf_repo", lambda self, token=None: setattr(self, "hub_model_id", "me/x")
    )
    with pytest.raises(SavedInPart, match=r"could not be uploaded: .*offline.*Upload it by: hf upload me/x"):
        train(config_for(max_steps=1, push_to_hub=True, hub_model_id="me/x"))
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_weights_that_cannot_be_written_leave_no_model_and_the_checkpoint_is_named(config_for, tmp_path, monkeypatch):
    run = TrainingRun(config_for(max_steps=2, save_steps=1))
    save_model = run.trainer.save_model

    def fail(folder, _internal_call=False):
        save_model(folder, _internal_call)
        if not _internal_call:  # of the trained model, not of a checkpoint
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(run.trainer, "save_model", fail)
    with pytest.raises(
        SavedInPart, match=r"could not be saved in .*out: .*No space left.*resume_from_checkpoint true .*checkpoint-2"
    ):
        run.execute()
    assert not (tmp_path / "out" / "config.json").exists() and not (tmp_path / "out" / ".partial_model").exists()
    assert train(config_for(max_steps=2, save_steps=1, resume_from_checkpoint=True)).steps == 2
    state = TrainerState.load_from_json(str(tmp_path / "out" / "trainer_state.json"))
    assert state.global_step == 2 and (tmp_path / "out" / "config.json").is_file()

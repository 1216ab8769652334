"""A run goes on where it was, by itself if it is told so, with steps of as many sequences."""

import os

import pytest
from safetensors.torch import save_file
from tiny import tiny_model
from training.outcomes import weights
from training.test_output_folder import checkpoint, config
from training.tiny_run import refused
from transformers import AutoConfig
from transformers.utils import logging

from midus_hf.training.optim.tensors import really_missing
from midus_hf.training.output.output_folder import check_output, start_output, write_options
from midus_hf.training.output.resumption import passes_of_a_step, settle_resumption
from midus_hf.training.output.run_checkpoints import finish_checkpoint
from midus_hf.training.run import run_setup
from midus_hf.training.run.train import prepare, train

STEP_OF_12 = '{"stateful_callbacks": {"StepSize": {"args": {}, "attributes": {"sequences": 12}}}}'


@pytest.mark.parametrize(
    ("processes", "batch_size", "passes"),
    [
        (1, 6, 2),
        (1, 12, 1),
        (2, 2, 3),
        (3, 4, 1),
        (
            5,
            1,
            "a step of the run to resume takes 12 sequences, which 5 processes cannot share; expected a number of processes",
        ),
        (
            2,
            4,
            "takes 12 sequences, 6 in each of 2 processes; expected a per_device_train_batch_size that divides these. "
            "Set per_device_train_batch_size to 3.",
        ),
        (4, 8, "per_device_train_batch_size is 8, and a step .* 3 in each of 4 processes; .* Set .* to 3."),
    ],
)
def test_a_step_takes_as_many_sequences_in_more_or_fewer_processes(
    tmp_path, monkeypatch, processes, batch_size, passes
):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    asked, before = (
        config(tmp_path, per_device_train_batch_size=batch_size),
        checkpoint(tmp_path / "out", 5, STEP_OF_12),
    )
    assert passes_of_a_step(asked, None) == 1
    if isinstance(passes, int):
        assert passes_of_a_step(asked, before) == passes
    else:
        with refused(passes):
            passes_of_a_step(asked, before)


def test_what_goes_on_or_begins_by_itself(tmp_path, monkeypatch):
    def settled(**changes):
        decided = settle_resumption(config(tmp_path, **changes))
        return decided.resume_from_checkpoint, decided.overwrite_output_dir

    output = tmp_path / "out"
    assert settled(resume_from_checkpoint="auto") == (False, False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert settled() == (False, False) and settled(overwrite_output_dir=True) == (False, True)
    output.mkdir()
    write_options(output, config(tmp_path))
    (output / "log.jsonl").touch()
    assert (
        settled() == settled(resume_from_checkpoint="auto") == settled(overwrite_output_dir=True) == (False, True)
    ), "it died early"
    checkpoint(output, 2)
    assert settled() == settled(resume_from_checkpoint="auto") == (True, False)
    assert settled(overwrite_output_dir=True) == settled(resume_from_checkpoint=True) == (True, False)
    assert settled(resume_from_checkpoint="named") == ("named", False), (
        "whoever names a checkpoint gets it, every time"
    )
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert settled(resume_from_checkpoint="auto") == (True, False)
    assert settled(overwrite_output_dir=True) == (False, True) and settled() == (False, False)


def test_what_lay_there_before_torchrun_began_is_no_run_to_go_on_with(tmp_path, monkeypatch):
    """Else the second start would take what the first was refused, or was told to overwrite and died before."""
    output, first = tmp_path / "out", tmp_path / "launch" / "attempt_0"
    checkpoint(output, 2)
    write_options(output, config(tmp_path))
    first.mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "launch" / "attempt_1" / "0" / "error.json"))

    def settled(**changes):
        decided = settle_resumption(config(tmp_path, **changes))
        return decided.resume_from_checkpoint, decided.overwrite_output_dir

    os.utime(output / "train_config.yaml", (1, 1))
    assert (settled(), settled(overwrite_output_dir=True)) == ((False, False), (False, True))
    assert settled(resume_from_checkpoint="auto") == (True, False), "which asks for it"
    os.utime(first, (0, 0))
    assert settled() == settled(overwrite_output_dir=True) == (True, False)
    first.rmdir()
    assert settled() == (True, False), "on a machine that has joined since"


def test_what_begins_by_itself_overwrites_no_trained_model_and_no_other_run(tmp_path, monkeypatch):
    output = tmp_path / "out"
    output.mkdir()
    write_options(output, config(tmp_path, learning_rate=0.5))
    with refused(
        r"learning_rate is 0\.01, but the run to resume has 0\.5; choose another output_dir, or set overwrite_output_dir: true\."
    ):
        settle_resumption(config(tmp_path, resume_from_checkpoint="auto"))
    write_options(output, config(tmp_path))
    (output / "config.json").write_text("{}")
    with refused(r"which exists; choose another, or set resume_from_checkpoint or overwrite_output_dir: true\."):
        check_output(settle_resumption(config(tmp_path, resume_from_checkpoint="auto")))


def test_tied_embeddings_are_not_told_to_be_missing_and_what_is_missing_is(
    upscaled, config_for, tmp_path, monkeypatch, caplog
):
    options = {"save_steps": 1, "max_steps": 2}
    output, model = tmp_path / "out", upscaled("qwen2")
    assert AutoConfig.from_pretrained(model).tie_word_embeddings
    train(config_for(output, model=model, **options))
    first = output / "checkpoint-1"
    monkeypatch.setattr(logging.get_logger("transformers"), "propagate", True)
    with caplog.at_level("WARNING", logger="transformers"):
        train(config_for(output, model=model, **options, resume_from_checkpoint=str(first)))
        assert not [record for record in caplog.records if "missing keys" in record.getMessage()]
        tensors = weights(first)
        del tensors["model.norm.weight"]
        save_file(tensors, first / "model.safetensors", {"format": "pt"})
        finish_checkpoint(first, ())
        train(config_for(output, model=model, **options, resume_from_checkpoint=str(first)))
    (told,) = {record.getMessage() for record in caplog.records if "missing keys" in record.getMessage()}
    assert "['model.norm.weight']" in told


def test_of_tied_tensors_of_which_none_was_loaded_all_are_missing():
    model = tiny_model("qwen2")
    names = ["lm_head.weight", "model.embed_tokens.weight"]
    assert really_missing(model, names) == names
    assert really_missing(model, ["lm_head.weight"]) == []
    assert really_missing(model, ["model.norm.weight", "lm_head.weight", "of.a.buffer"]) == [
        "model.norm.weight",
        "of.a.buffer",
    ]


BEGUN_MEANWHILE = (
    r"output_dir is '.*out', which another run has written since this run checked it; start this run again to go on from "
    r"the files that are there now, or choose another folder\."
)


def test_what_another_run_did_while_a_model_was_loaded_is_neither_overwritten_nor_gone_back_on(
    config_for, tmp_path, monkeypatch
):
    output = tmp_path / "out"
    asked = config_for(output, resume_from_checkpoint="auto", max_steps=2)
    prepare(asked)  # dies before its first checkpoint
    assert (output / "train_config.yaml").exists()
    steps = iter((2, 4))

    def another_run(seed):
        folder = checkpoint(output, next(steps))
        (folder / "state").touch()

    monkeypatch.setattr(run_setup, "set_seed", another_run)
    with refused(BEGUN_MEANWHILE):
        prepare(asked)  # which meant to overwrite what died
    assert (output / "checkpoint-2" / "state").exists()
    with refused(BEGUN_MEANWHILE):
        prepare(asked)  # which meant to go on from step 2
    assert (output / "checkpoint-4" / "state").exists()


def test_what_was_decided_stands_where_nothing_changed_and_where_overwriting_was_asked_for(tmp_path):
    for given in ({"resume_from_checkpoint": "auto"}, {"overwrite_output_dir": True}):
        asked = config(tmp_path, **given)
        decided = settle_resumption(asked)
        lock = start_output(decided, asked, check_output(decided))
        assert lock is not None and (tmp_path / "out" / "train_config.yaml").exists()
        lock.release()

"""Whose folder a run writes, and what it leaves there when it is refused."""

import pytest
from training.tiny_run import refused

from midus_hf.files.outputs import alone_in
from midus_hf.training.run import TrainingRun, train


def test_a_folder_with_files_is_refused_and_left_alone(config_for, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    for changes in ({}, {"resume_from_checkpoint": "auto"}):
        with refused(
            r"output_dir is '.*out', which holds thesis\.txt; choose another folder, remove it, or set resume_from"
        ):
            TrainingRun(config_for(**changes))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("file", "output_dir is '.*file', a file; expected a folder"),
        ("file/out", "but '.*file' is no folder to write in; choose another"),
        ("texts", "which holds the corpus '.*000.txt'; choose another folder"),
        ("texts/out", "which lies in the corpus '.*texts'; choose another folder"),
    ],
)
def test_a_place_that_is_none_for_a_run_is_refused(config_for, tmp_path, output, message):
    (tmp_path / "file").touch()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "000.txt").write_text("w3 w4 " * 20)
    read = tmp_path / "texts" / ("000.txt" if output == "texts" else "")
    with refused(message):
        TrainingRun(config_for(output, corpus=str(read)))
    assert not (tmp_path / "texts" / "out").exists()


def test_two_runs_at_once_do_not_write_one_folder(config_for, tmp_path):
    busy = ValueError("busy")
    with (
        alone_in(tmp_path / "out", busy),
        refused(r"output_dir '.*out' is being written by another run\. Wait for it, or choose another folder\."),
    ):
        TrainingRun(config_for(max_steps=1, resume_from_checkpoint="auto"))
    assert not list((tmp_path / "out").iterdir())
    run = TrainingRun(config_for(max_steps=1))
    with refused("busy"), alone_in(tmp_path / "out", busy):
        pass
    run.execute()
    with alone_in(tmp_path / "out", busy):
        pass


@pytest.mark.parametrize("trained", [False, True])
def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(config_for, tmp_path, trained):
    """Unless a model stands there, which it would replace."""
    (tmp_path / "out").mkdir()
    for name in ("train_config.yaml", *(["config.json"] if trained else [])):
        (tmp_path / "out" / name).write_text("{}")
    if trained:
        with refused(r"output_dir is '.*out', which holds config\.json, train_config\.yaml; choose another folder"):
            TrainingRun(config_for(max_steps=1, resume_from_checkpoint="auto"))
    else:
        assert train(config_for(max_steps=1, resume_from_checkpoint="auto")).steps == 1


def test_a_run_that_is_refused_leaves_nothing(config_for, corpus, tmp_path):
    with refused("the corpus|sequence"):
        TrainingRun(config_for("deep/out", corpus=str(corpus / "000.txt"), sequence_length=128))
    assert not (tmp_path / "deep" / "out").exists()
    assert train(config_for("deep/out", max_steps=1)).steps == 1

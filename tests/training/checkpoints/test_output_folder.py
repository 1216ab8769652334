"""Whose folder a run writes, and what it leaves there when it is refused."""

import pytest
from training.tiny_run import refused

from midus_hf.files.outputs import alone_in
from midus_hf.training.run import TrainingRun, train


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({"output": "full", **more}, r"'.*full', which holds thesis\.txt; choose another folder, remove it, or set resume_from")
            for more in ({}, {"resume_from_checkpoint": "auto"})
        ),
        ({"output": "file"}, "output_dir is '.*file', a file; expected a folder"),
        ({"output": "file/out"}, "but '.*file' is no folder to write in; choose another"),
        ({"output": "texts", "corpus": "texts/000.txt"}, "which holds the corpus '.*000.txt'; choose another folder"),
        ({"output": "texts/out"}, "which lies in the corpus '.*texts'; choose another folder"),
        (
            {"output": "full", "resume_from_checkpoint": "auto", "model_there": True},
            r"'.*full', which holds config\.json, train_config\.yaml; choose another folder",
        ),
        ({"output": "deep/out", "sequence_length": 128}, "the corpus|sequence"),
    ],
)  # fmt: skip
def test_a_place_that_is_none_for_a_run_is_refused_and_left_alone(changes, message, config_for, tmp_path):
    changes, names = dict(changes), ["thesis.txt"]
    if changes.pop("model_there", False):
        names = ["config.json", "train_config.yaml"]
    for name in ("file", "texts/000.txt", *(f"full/{name}" for name in names)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("w3 w4 " * 20)
    corpus = str(tmp_path / changes.pop("corpus", "texts"))
    with refused(message):
        TrainingRun(config_for(corpus=corpus, **changes))
    assert sorted(path.name for path in (tmp_path / "full").iterdir()) == names
    assert not (tmp_path / "texts" / "out").exists() and not (tmp_path / "deep" / "out").exists()


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


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(config_for, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train_config.yaml").write_text("{}")
    assert train(config_for(max_steps=1, resume_from_checkpoint="auto")).steps == 1

"""A run writes where it may, resumes what is whole and its own, and never leaves half a model."""

import os
import re
import shutil
from pathlib import Path

import pytest
from training.tiny_run import tiny_config

from midus_hf.files.checkpoint_files import PARTIAL_MODEL
from midus_hf.files.run_files import foreign_files
from midus_hf.training.output.output_folder import as_yaml, check_output, publish
from midus_hf.training.output.run_checkpoints import finish_checkpoint, last_checkpoint, remove_old_checkpoints
from midus_hf.training.run import train as run
from midus_hf.training.run.run_trainer import RunTrainer
from midus_hf.training.run.train import prepare, train


def checkpoint(output: Path, step: int, state: str | None = "{}") -> Path:
    folder = output / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    if state is not None:
        (folder / "trainer_state.json").write_text(state)
        finish_checkpoint(folder, ())
    return folder


def config(tmp_path: Path, **changes):
    return tiny_config(tmp_path / "model", tmp_path / "corpus", tmp_path / "out", **changes)


def test_the_latest_checkpoint_is_the_highest_one_that_is_whole(tmp_path):
    assert last_checkpoint(tmp_path / "absent") is None
    expected = checkpoint(tmp_path, 10)
    checkpoint(tmp_path, 9)
    checkpoint(tmp_path, 20, state=None)
    (checkpoint(tmp_path, 30) / "manifest.json").write_text('{"trainer_st')
    assert last_checkpoint(tmp_path) == expected


def test_an_output_that_exists_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    assert check_output(config(tmp_path)) is None, "an empty folder is free"
    (tmp_path / "out" / "file").touch()
    with pytest.raises(ValueError, match=r"which exists; choose another, or set resume or overwrite: true."):
        check_output(config(tmp_path))


def test_only_an_earlier_run_is_overwritten(upscaled, corpus, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    (output / "precious").touch()
    with pytest.raises(ValueError, match=r"which no run of ours wrote: it has no train_config.yaml"):
        train(tiny_config(upscaled("llama"), corpus, output, max_steps=1, overwrite=True))
    assert (output / "precious").exists()


@pytest.mark.parametrize("resume", [False, "auto"])
@pytest.mark.parametrize("options", ["model: mine\n", "- not even options\n", "", None])
def test_a_model_beside_options_that_no_run_of_ours_wrote_is_not_overwritten(
    upscaled, corpus, tmp_path, options, resume
):
    """Another program may call its options the same; what `as_yaml` gives is what a person has as a recipe of their own."""
    output = tmp_path / "out"
    output.mkdir()
    wanted = tiny_config(upscaled("llama"), corpus, output, max_steps=1, overwrite=not resume, resume=resume)
    (output / "train_config.yaml").write_text(as_yaml(wanted) if options is None else options)
    (output / "model.safetensors").write_text("a person's")
    before = {path.name: path.read_text() for path in output.iterdir()}
    with pytest.raises(ValueError) as raised:
        train(wanted)
    assert str(raised.value) == (
        f"output is {str(output)!r}, which exists; choose another, or set resume or overwrite: true."
        if resume
        else f"output is {str(output)!r}, which no run of ours wrote: its train_config.yaml is not one that runs write. Choose "
        "another folder, or remove it yourself."
    )
    assert {path.name: path.read_text() for path in output.iterdir()} == before


@pytest.fixture(scope="module")
def written(upscaled, corpus, tmp_path_factory) -> Path:
    """The output of a run that wrote whatever a run may write."""
    pytest.importorskip("tensorboard")
    model = tmp_path_factory.mktemp("written") / "model"
    shutil.copytree(upscaled("llama"), model)
    (model / "LICENSE.txt").write_text("terms")
    output = model.parent / "out"
    train(tiny_config(model, corpus, output, max_steps=4, save_every=2, report_to="tensorboard"))
    (output / PARTIAL_MODEL).mkdir()
    shutil.copy(output / "model.safetensors", output / PARTIAL_MODEL)
    (output / ".log.jsonl.midus-01234567.partial").touch()
    return output


def test_everything_that_a_run_writes_is_overwritten(written, corpus, tmp_path):
    output = shutil.copytree(written, tmp_path / "out")
    assert foreign_files(output) == []
    train(tiny_config(written.parent / "model", corpus, output, max_steps=1, overwrite=True))
    fresh = tmp_path / "fresh"
    train(tiny_config(written.parent / "model", corpus, fresh, max_steps=1))
    assert names(output) == names(fresh)


@pytest.mark.parametrize("place", ["absent", "link"])
def test_an_output_that_is_not_there_or_is_a_link_may_be_asked_to_be_overwritten(written, corpus, tmp_path, place):
    output = tmp_path / "out"
    if place == "link":
        shutil.copytree(written, tmp_path / "elsewhere")
        output.symlink_to(tmp_path / "elsewhere")
    train(tiny_config(written.parent / "model", corpus, output, max_steps=1, overwrite=True))
    assert output.is_symlink() == (place == "link")
    assert (output / "model.safetensors").is_file() and not list(output.glob("checkpoint-*"))


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize(
    ("added", "named"),
    [
        ("notes.md", "notes.md"),
        ("src/main.py", "src/"),
        (".git/HEAD", ".git/"),
        ("model/weights.safetensors", "model/"),
        ("checkpoint-2/results.csv", "checkpoint-2/results.csv"),
        ("checkpoint-2/runs/events.out.tfevents.1", "checkpoint-2/runs/events.out.tfevents.1"),
        ("checkpoint-best/config.json", "checkpoint-best/"),
        ("runs/plot.png", "runs/plot.png"),
    ],
)
def test_what_a_person_put_there_is_named_and_stays(added, named, written, corpus, tmp_path):
    output = shutil.copytree(written, tmp_path / "out")
    (output / added).parent.mkdir(exist_ok=True, parents=True)
    (output / added).write_text("precious")
    before = names(output)
    message = f"which also holds what no run of ours wrote: {named}. Move that away, or choose another folder."
    with pytest.raises(ValueError, match=re.escape(message)):
        train(tiny_config(written.parent / "model", corpus, output, overwrite=True))
    assert names(output) == before and (output / added).read_text() == "precious"


def test_links_are_never_removed_and_many_files_are_named_in_part(written, tmp_path):
    output = shutil.copytree(written, tmp_path / "out")
    (tmp_path / "elsewhere").mkdir()
    (output / "checkpoint-9").symlink_to(tmp_path / "elsewhere")
    (output / "model.safetensors").unlink()
    (output / "model.safetensors").symlink_to(tmp_path / "elsewhere" / "weights")
    assert foreign_files(output) == ["checkpoint-9", "model.safetensors"]
    for index in range(5):
        (output / f"note-{index}").touch()
    changed = config(tmp_path, overwrite=True)
    with pytest.raises(ValueError, match=r"checkpoint-9, model.safetensors, note-0, note-1, note-2 and 2 more\."):
        check_output(changed)


def test_a_checkpoint_that_is_a_link_is_resumed_and_not_removed(tmp_path):
    elsewhere = checkpoint(tmp_path / "elsewhere", 9)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "checkpoint-9").symlink_to(elsewhere)
    checkpoint(tmp_path / "out", 10)
    remove_old_checkpoints(tmp_path / "out", step=10, keep=1)
    assert (elsewhere / "trainer_state.json").exists()
    shutil.rmtree(tmp_path / "out" / "checkpoint-10")
    assert last_checkpoint(tmp_path / "out") == tmp_path / "out" / "checkpoint-9"


def test_old_checkpoints_are_removed_but_not_what_a_person_put_into_them(tmp_path):
    for step in (1, 2, 3, 9):
        checkpoint(tmp_path, step)
    checkpoint(tmp_path, 4, state=None)
    (tmp_path / "checkpoint-1" / "notes.txt").touch()
    remove_old_checkpoints(tmp_path, step=3, keep=None)
    assert len(names(tmp_path)) == 5 + 2 * 4 + 1
    remove_old_checkpoints(tmp_path, step=3, keep=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    remove_old_checkpoints(tmp_path, step=3, keep=1)
    assert names(tmp_path) == [
        "checkpoint-1",
        "checkpoint-1/notes.txt",
        "checkpoint-3",
        "checkpoint-3/manifest.json",
        "checkpoint-3/trainer_state.json",
    ]


def test_an_output_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(ValueError, match=r"a file; expected a folder."):
        check_output(config(tmp_path))


@pytest.mark.parametrize("held", ["model", "corpus"])
def test_an_output_that_holds_an_input_is_refused(tmp_path, held):
    (tmp_path / "out" / "inner").mkdir(parents=True)
    changed = config(tmp_path, overwrite=True)
    if held == "model":
        changed.model = str(tmp_path / "out" / "inner")
    else:
        changed.corpus.path = str(tmp_path / "out")
    with pytest.raises(ValueError, match=f"which holds the {held} '.*'; choose another folder."):
        check_output(changed)


def test_resuming_needs_a_whole_checkpoint(tmp_path):
    checkpoint(tmp_path / "out", 5, state=None)
    with pytest.raises(
        ValueError, match=r"resume is true, but output '.*' holds no complete checkpoint; start the run"
    ):
        check_output(config(tmp_path, resume=True))
    with pytest.raises(
        ValueError, match=r"which is no whole checkpoint \(it was not written to its end\); expected a folder"
    ):
        check_output(config(tmp_path, resume=str(tmp_path / "out" / "checkpoint-5")))


def test_a_checkpoint_can_be_named(tmp_path):
    named = checkpoint(tmp_path / "elsewhere", 5)
    checkpoint(tmp_path / "out", 7)
    assert check_output(config(tmp_path, resume=str(named))) == named


@pytest.mark.parametrize("around", ["model", "corpus"])
def test_an_output_inside_an_input_is_refused(tmp_path, around):
    (tmp_path / around).mkdir()
    changed = config(tmp_path)
    changed.output = str(tmp_path / around / "out")
    with pytest.raises(ValueError, match=rf"which lies in the {around} '.*'; choose another folder\."):
        check_output(changed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"learning_rate": 0.5},
            "learning_rate is 0.5, but the run to resume has 0.01; give the same, or start a new run",
        ),
        ({"max_steps": 30}, "max_steps is 30, but the run to resume has 20"),
        ({"corpus_options": {"column": "body"}}, "corpus is {.*'column': 'body'.*}, but the run to resume has {"),
    ],
)
def test_a_resumed_run_keeps_the_options_that_it_began_with(upscaled, corpus, tmp_path, changes, message):
    prepare(tiny_config(upscaled("llama"), corpus, tmp_path / "out"))
    checkpoint(tmp_path / "out", 5)
    with pytest.raises(ValueError, match=message):
        check_output(tiny_config(upscaled("llama"), corpus, tmp_path / "out", resume=True, **changes))
    free = {"log_every": 3, "save_every": 2, "keep_checkpoints": 1, "activation_checkpointing": True}
    free["corpus_options"] = {"cache_dir": str(tmp_path / "elsewhere")}
    assert check_output(tiny_config(upscaled("llama"), corpus, tmp_path / "out", resume=True, **free))


def test_a_wrong_request_writes_nothing(upscaled, corpus, tmp_path):
    wrong = tiny_config(upscaled("llama"), corpus / "000.txt", tmp_path / "out", sequence_length=128)
    with pytest.raises(ValueError, match=r"the corpus has 61 tokens; expected at least one sequence"):
        train(wrong)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_was_made_for_a_run_that_its_trainer_refuses_goes_again_and_no_other(
    upscaled, corpus, tmp_path, monkeypatch
):
    class Refusing(RunTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            assert Path(self.args.output_dir).is_dir(), "a Trainer makes it"
            raise ValueError("refused")

    monkeypatch.setattr(run, "RunTrainer", Refusing)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "empty").mkdir()
    for place in ("new", "deep/er/new", "there/new", "there/empty"):
        with pytest.raises(ValueError, match="refused"):
            prepare(tiny_config(upscaled("llama"), corpus, tmp_path / place))
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["there", "there/empty"]


def test_the_config_of_a_published_model_comes_last_and_the_old_one_goes_first(tmp_path, monkeypatch):
    partial = tmp_path / PARTIAL_MODEL
    templates = "additional_chat_templates"
    (partial / templates).mkdir(parents=True)
    for name in ("config.json", "a.json", "model.safetensors", "z.json", f"{templates}/chat.jinja"):
        (partial / name).write_text("new")
    (tmp_path / "config.json").write_text("old")
    (tmp_path / templates).mkdir()
    (tmp_path / templates / "old.jinja").touch()
    moved: list[str] = []
    replace = os.replace

    def watched(source, target):
        assert not (tmp_path / "config.json").exists()
        moved.append(Path(source).name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    publish(partial, tmp_path, {"LICENSE": b"terms"})
    assert (tmp_path / "LICENSE").read_bytes() == b"terms"
    assert moved[-1] == "config.json" and len(moved) == 6
    assert (tmp_path / "config.json").read_text() == "new"
    assert [path.name for path in (tmp_path / templates).iterdir()] == ["chat.jinja"]
    assert not partial.exists()


def test_of_folders_that_a_published_model_replaces_what_a_person_put_there_stays(tmp_path):
    partial, bank = tmp_path / PARTIAL_MODEL, "memory_bank/hier-ffn"
    for folder, text in ((partial, "new"), (tmp_path, "old")):
        (folder / bank).mkdir(parents=True)
        for name in ("bank.json", "level-1.safetensors"):
            (folder / bank / name).write_text(text)
    (tmp_path / bank / "level-2.safetensors").write_text("old")
    (tmp_path / bank / "notes.txt").write_text("precious")
    publish(partial, tmp_path, {})
    found = {path.name: path.read_text() for path in (tmp_path / bank).iterdir()}
    assert found == {"bank.json": "new", "level-1.safetensors": "new", "notes.txt": "precious"}
    assert not partial.exists()


def test_what_a_killed_run_left_of_a_model_is_cleared(upscaled, corpus, tmp_path):
    options = {"max_steps": 4, "save_every": 2}
    train(tiny_config(upscaled("llama"), corpus, tmp_path / "out", **options))
    (tmp_path / "out" / PARTIAL_MODEL).mkdir()
    (tmp_path / "out" / PARTIAL_MODEL / "stale.safetensors").touch()
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    result = train(tiny_config(upscaled("llama"), corpus, tmp_path / "out", resume=True, **options))
    assert not list((tmp_path / "out").rglob("*stale*"))
    assert (result.steps, result.tokens, result.tokens_per_second) == (4, 4 * 2 * 16, None), "the run was finished"
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before

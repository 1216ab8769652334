"""A run writes where it may, resumes what is whole and its own, and never leaves half a model."""

import os
import re
import shutil
from pathlib import Path

import pytest
from training.accelerate_configs import launched_environment
from training.tiny_run import refused, tiny_config

from midus_hf.files.checkpoint_files import PARTIAL_MODEL
from midus_hf.files.run_files import foreign_files
from midus_hf.training.output.output_folder import as_yaml, check_output, publish
from midus_hf.training.output.run_checkpoints import finish_checkpoint, last_checkpoint, remove_old_checkpoints
from midus_hf.training.run.train import prepare, train

STEP_SIZE = '{"stateful_callbacks": {"StepSize": {"args": {}, "attributes": {"sequences": 2}}}}'


def checkpoint(output: Path, step: int, state: str | None = STEP_SIZE) -> Path:
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


# A file that is there, options that ask for the output, and what is said of it.
REFUSED = {
    "exists": (
        "out/file",
        {},
        "which exists; choose another, or set resume_from_checkpoint or overwrite_output_dir: true.",
    ),
    "a-file": ("out", {}, "a file; expected a folder."),
    "holds-the-model": (
        "out/inner/file",
        {"overwrite_output_dir": True, "model_name_or_path": "out/inner"},
        "which holds the model_name_or_path '",
    ),
    "holds-the-corpus": ("out/file", {"overwrite_output_dir": True, "corpus": "out"}, "which holds the corpus '"),
    "in-the-model": ("model/file", {"output_dir": "model/out"}, "which lies in the model_name_or_path '"),
    "in-the-corpus": ("corpus/file", {"output_dir": "corpus/out"}, "which lies in the corpus '"),
    "no-checkpoint": (
        "out/checkpoint-5/file",
        {"resume_from_checkpoint": True},
        "' holds no complete checkpoint; start the run",
    ),
    "damaged": (
        "out/checkpoint-5/file",
        {"resume_from_checkpoint": "out/checkpoint-5"},
        "which is no whole checkpoint (it was not written to its end); expected a folder",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_output_that_a_run_cannot_have_is_refused(case, tmp_path):
    file, changes, message = REFUSED[case]
    paths = {"model_name_or_path": "model", "corpus": "corpus", "output_dir": "out", **changes}
    paths = {name: str(tmp_path / path) if isinstance(path, str) else path for name, path in paths.items()}
    wanted = tiny_config(paths.pop("model_name_or_path"), paths.pop("corpus"), paths.pop("output_dir"), **paths)
    if case == "exists":
        (tmp_path / "out").mkdir()
        assert check_output(wanted) is None, "an empty folder is free"
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).touch()
    with refused(re.escape(message)):
        check_output(wanted)


def test_only_an_earlier_run_is_overwritten(config_for, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    (output / "precious").touch()
    with refused(r"which no run of ours wrote: it has no train_config.yaml"):
        train(config_for(output, max_steps=1, overwrite_output_dir=True))
    assert (output / "precious").exists()


@pytest.mark.parametrize("resume", [False, "auto"])
@pytest.mark.parametrize("options", ["model_name_or_path: mine\n", "- not even options\n", "", None])
def test_a_model_beside_options_that_no_run_of_ours_wrote_is_not_overwritten(config_for, tmp_path, options, resume):
    """Another program may call its options the same; what `as_yaml` gives is what a person has as a recipe of their own."""
    output = tmp_path / "out"
    output.mkdir()
    wanted = config_for(output, max_steps=1, overwrite_output_dir=not resume, resume_from_checkpoint=resume)
    (output / "train_config.yaml").write_text(as_yaml(wanted) if options is None else options)
    (output / "model.safetensors").write_text("a person's")
    before = {path.name: path.read_text() for path in output.iterdir()}
    with pytest.raises(ValueError) as raised:
        train(wanted)
    assert str(raised.value) == (
        f"output_dir is {str(output)!r}, which exists; choose another, or set resume_from_checkpoint or overwrite_output_dir: true."
        if resume
        else f"output_dir is {str(output)!r}, which no run of ours wrote: its train_config.yaml is not one that runs write. Choose "
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
    train(tiny_config(model, corpus, output, max_steps=4, save_steps=2, report_to="tensorboard"))
    (output / PARTIAL_MODEL).mkdir()
    shutil.copy(output / "model.safetensors", output / PARTIAL_MODEL)
    (output / ".log.jsonl.midus-01234567.partial").touch()
    return output


def test_everything_that_a_run_writes_is_overwritten(written, config_for, tmp_path):
    output = shutil.copytree(written, tmp_path / "out")
    assert foreign_files(output) == [] and list(output.rglob("events.out.tfevents.*"))
    train(config_for(output, model=written.parent / "model", max_steps=1, overwrite_output_dir=True))
    fresh = tmp_path / "fresh"
    train(config_for(fresh, model=written.parent / "model", max_steps=1))
    assert names(output) == names(fresh)


@pytest.mark.parametrize("place", ["absent", "link"])
def test_an_output_that_is_not_there_or_is_a_link_may_be_asked_to_be_overwritten(written, config_for, tmp_path, place):
    output = tmp_path / "out"
    if place == "link":
        shutil.copytree(written, tmp_path / "elsewhere")
        output.symlink_to(tmp_path / "elsewhere")
    train(config_for(output, model=written.parent / "model", max_steps=1, overwrite_output_dir=True))
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
def test_what_a_person_put_there_is_named_and_stays(added, named, written, config_for, tmp_path):
    output = shutil.copytree(written, tmp_path / "out")
    (output / added).parent.mkdir(exist_ok=True, parents=True)
    (output / added).write_text("precious")
    before = names(output)
    message = f"which also holds what no run of ours wrote: {named}. Move that away, or choose another folder."
    with refused(re.escape(message)):
        train(config_for(output, model=written.parent / "model", overwrite_output_dir=True))
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
    changed = config(tmp_path, overwrite_output_dir=True)
    with refused(r"checkpoint-9, model.safetensors, note-0, note-1, note-2 and 2 more\."):
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


def test_a_checkpoint_can_be_named(tmp_path):
    named = checkpoint(tmp_path / "elsewhere", 5)
    checkpoint(tmp_path / "out", 7)
    assert check_output(config(tmp_path, resume_from_checkpoint=str(named))) == named


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
def test_a_resumed_run_keeps_the_options_that_it_began_with(config_for, tmp_path, changes, message):
    prepare(config_for())
    checkpoint(tmp_path / "out", 5)
    with refused(message):
        check_output(config_for(resume_from_checkpoint=True, **changes))
    free = {"logging_steps": 3, "save_steps": 2, "save_total_limit": 1, "activation_checkpointing": True}
    free["corpus_options"] = {"cache_dir": str(tmp_path / "elsewhere")}
    assert check_output(config_for(resume_from_checkpoint=True, **free))


def test_a_wrong_request_writes_nothing(upscaled, corpus, tmp_path):
    wrong = tiny_config(upscaled("llama"), corpus / "000.txt", tmp_path / "out", sequence_length=128)
    with refused(r"the corpus has 61 tokens; expected at least one sequence"):
        train(wrong)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_was_made_for_a_run_that_its_trainer_refuses_goes_again_and_no_other(
    config_for, tmp_path, monkeypatch
):
    for variable, value in launched_environment("fsdp2").items():
        monkeypatch.setenv(variable, value)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "empty").mkdir()
    for place in ("new", "deep/er/new", "there/new", "there/empty"):
        with refused("accelerate was started with FSDP, which does not shard on cpu"):
            prepare(config_for(place))
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


def test_what_a_killed_run_left_of_a_model_is_cleared(config_for, tmp_path):
    options = {"max_steps": 4, "save_steps": 2}
    train(config_for(**options))
    (tmp_path / "out" / PARTIAL_MODEL).mkdir()
    (tmp_path / "out" / PARTIAL_MODEL / "stale.safetensors").touch()
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    result = train(config_for(resume_from_checkpoint=True, **options))
    assert not list((tmp_path / "out").rglob("*stale*"))
    assert (result.steps, result.tokens, result.tokens_per_second) == (4, 4 * 2 * 16, None), "the run was finished"
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before

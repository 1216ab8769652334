"""A checkpoint is believed by its manifest: what is damaged is passed over, said, and never costs the one that is whole."""

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from training.outcomes import as_it_was_at, exact_log, flip, moved, weights
from training.tiny_run import refused, tiny_config

from midus_hf.files.checkpoint_files import BEGUN_CHECKPOINT
from midus_hf.files.run_files import remove_written
from midus_hf.training.output import run_checkpoints
from midus_hf.training.output.output_folder import check_output
from midus_hf.training.output.resumption import settle_resumption
from midus_hf.training.output.run_checkpoints import (
    UNFINISHED,
    begin_checkpoint,
    damage_of,
    finish_checkpoint,
    is_complete,
    last_checkpoint,
    remove_old_checkpoints,
)
from midus_hf.training.run.train import train

OPTIONS = {"max_steps": 6, "save_steps": 2, "save_total_limit": None}


@pytest.fixture(scope="module")
def whole(upscaled, corpus, tmp_path_factory) -> Path:
    """The output of a run that nobody disturbed, with all of its checkpoints."""
    output = tmp_path_factory.mktemp("whole") / "out"
    train(tiny_config(upscaled("llama"), corpus, output, **OPTIONS))
    return output


@pytest.fixture
def output(whole, tmp_path) -> Path:
    """The same run as it was when it had saved its checkpoint of step 4."""
    return as_it_was_at(4, whole, tmp_path / "out")


@pytest.fixture
def resumed(config_for):
    """Return what gives the options of the same run, to be gone on with."""
    return lambda **changes: config_for(**{**OPTIONS, "resume_from_checkpoint": "auto", **changes})


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


CONTENTS = "{} does not have the contents that were written"
DAMAGES = {
    **{
        f"no-{name}": (Path.unlink, name, "{} is missing")
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors", "config.json")
    },
    **{f"flipped-{name}": (flip, name, CONTENTS) for name in ("model.safetensors", "optimizer.pt", "scheduler.pt")},
    **{f"cut-{name}": (cut, name, "{} has ") for name in ("model.safetensors", "optimizer.pt", "trainer_state.json")},
    "a-folder": (lambda path: (path.unlink(), path.mkdir()), "optimizer.pt", "{} has "),
    "garbage": (lambda path: path.write_bytes(b"\xff" * path.stat().st_size), "trainer_state.json", CONTENTS),
    "no-manifest": (Path.unlink, "manifest.json", "{} is missing"),
    "unfinished": (lambda path: path.rename(path.with_name(BEGUN_CHECKPOINT)), "manifest.json", "it was not written"),
    **{
        f"manifest-{number}": (lambda path, text=text: path.write_text(text), "manifest.json", "its {} is damaged")
        for number, text in enumerate(("", "{}", "[]", "{" * 100_000, "[" * 100_000, '{"trainer_state.json": 3}', "null"))
    },
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_damaged_is_passed_over_for_what_is_whole_beside_it(name, resumed, output, capsys):
    damage, file, reason = DAMAGES[name]
    damage(output / "checkpoint-4" / file)
    config = settle_resumption(resumed())
    assert config.resume_from_checkpoint is True and not config.overwrite_output_dir
    assert check_output(config) == output / "checkpoint-2"
    (line,) = capsys.readouterr().err.splitlines()
    if file == "manifest.json" and "damaged" in reason:
        reason = "its manifest" if name == "manifest-5" else reason
    assert line.startswith(f"checkpoint-4 is passed over: {reason.format(file)}")


def test_what_goes_on_from_the_whole_one_is_the_run_that_nobody_disturbed(resumed, output, whole, capsys):
    damage, file, _ = DAMAGES["flipped-model.safetensors"]
    damage(output / "checkpoint-4" / file)
    train(resumed())
    told = capsys.readouterr()
    assert told.err.count("is passed over") == 1 and f"going on from {output / 'checkpoint-2'}\n" in told.out
    assert exact_log(output) == exact_log(whole)
    for folder in ("", "checkpoint-4", "checkpoint-6"):
        assert moved(output / folder, whole / folder) == set()
    states = [torch.load(run / "checkpoint-6" / "optimizer.pt")["state"] for run in (output, whole)]
    assert all(torch.equal(states[0][key][part], states[1][key][part]) for key in states[0] for part in states[0][key])
    assert all(damage_of(output / f"checkpoint-{step}") is None for step in (2, 4, 6))


def test_all_that_are_passed_over_stand_in_one_line(resumed, output, capsys):
    shutil.copytree(output / "checkpoint-4", output / "checkpoint-5")
    (output / "checkpoint-5" / "rng_state.pth").unlink()
    flip(output / "checkpoint-4" / "optimizer.pt")
    assert check_output(resumed(resume_from_checkpoint=True)) == output / "checkpoint-2"
    assert capsys.readouterr().err == (
        "checkpoint-5 is passed over: rng_state.pth is missing; "
        "checkpoint-4 is passed over: optimizer.pt does not have the contents that were written\n"
    )


def test_a_run_never_begins_again_over_checkpoints_of_which_none_is_whole(resumed, output):
    flip(output / "checkpoint-4" / "optimizer.pt")
    (output / "checkpoint-2" / "manifest.json").unlink()
    before = sorted(output.rglob("*"))
    with refused(
        r"output_dir '.*out' holds no whole checkpoint \(checkpoint-4: optimizer\.pt does not have the contents that were written; "
        r"checkpoint-2: manifest.json is missing\); put back what is missing, or start the run again with "
        r"resume_from_checkpoint: false and overwrite_output_dir: true\."
    ):
        train(resumed())
    assert sorted(output.rglob("*")) == before
    train(resumed(resume_from_checkpoint=False, overwrite_output_dir=True, max_steps=1))


def test_a_run_that_died_in_its_first_checkpoint_begins_again(resumed, output):
    shutil.rmtree(output / "checkpoint-4")
    manifest = output / "checkpoint-2" / "manifest.json"
    manifest.rename(manifest.with_name(BEGUN_CHECKPOINT))
    decided = settle_resumption(resumed())
    assert (decided.resume_from_checkpoint, decided.overwrite_output_dir) == (False, True)


def test_a_damaged_checkpoint_that_is_named_is_refused(resumed, output):
    named = output / "checkpoint-4"
    (named / "scheduler.pt").unlink()
    with refused(
        r"resume_from_checkpoint is '.*checkpoint-4', which is no whole checkpoint \(scheduler\.pt is missing\); expected a folder "
        r"checkpoint-N with all that a run wrote there\. Name another one, or set "
        r"resume_from_checkpoint: true for the latest that is whole\."
    ):
        check_output(resumed(resume_from_checkpoint=str(named)))


def test_a_checkpoint_whose_trained_tensors_are_not_finite_is_passed_over(resumed, output, whole, capsys):
    """As versions left them that looked at logged losses alone; what is frozen may be what it is."""
    tensors = weights(output / "checkpoint-4")
    tensors["model.layers.4.self_attn.q_proj.weight"].view(-1)[3] = float("inf")
    save_file(tensors, output / "checkpoint-4" / "model.safetensors", {"format": "pt"})
    finish_checkpoint(output / "checkpoint-4", ())
    with refused(r"no whole checkpoint \(model\.layers\.4\.self_attn\.q_proj\.weight holds inf\)"):
        train(resumed(resume_from_checkpoint=str(output / "checkpoint-4")))
    train(resumed())
    line = "checkpoint-4 is passed over: model.layers.4.self_attn.q_proj.weight holds inf\n"
    assert capsys.readouterr().err.count(line) == 1
    assert exact_log(output) == exact_log(whole)


REMOVALS = {
    "the oldest": lambda output: remove_old_checkpoints(output, step=4, keep=1),
    "one that is written again": lambda output: begin_checkpoint(output / "checkpoint-4"),
    "one that could not be written": lambda output: remove_written(output, output / "checkpoint-4"),
    "a run that is overwritten": lambda output: remove_written(output, output),
}


@pytest.mark.parametrize("name", REMOVALS)
def test_what_is_left_of_a_checkpoint_whose_removal_was_killed_is_never_believed(name, output, tmp_path, monkeypatch):
    """Wherever it ends: the checkpoint is whole, or it is one that was not written to its end."""
    unlink, removed, last = Path.unlink, [], [-1]

    def killed(path, missing_ok=False):
        if len(removed) == last[0]:
            raise KeyboardInterrupt  # which nothing catches, as little as SIGKILL
        removed.append(path)
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", killed)
    shutil.copytree(output, tmp_path / "whole", copy_function=os.link)
    REMOVALS[name](tmp_path / "whole")
    points = [number for number, path in enumerate(removed) if path.suffix != ".py"]
    assert len(points) > 10
    for point in points:
        there = tmp_path / str(point)
        shutil.copytree(output, there, copy_function=os.link)
        removed.clear()
        last[0] = point
        with pytest.raises(KeyboardInterrupt):
            REMOVALS[name](there)
        damages = [damage_of(path) for path in there.glob("checkpoint-*")]
        assert set(damages) <= {None, UNFINISHED}
        assert not point or UNFINISHED in damages or len(damages) < 2


def test_what_a_person_puts_beside_a_checkpoint_is_ignored(resumed, output, whole):
    """Both beside one that is whole, and where one is written."""
    (output / "checkpoint-4" / "notes.txt").write_text("mine")
    assert damage_of(output / "checkpoint-4") is None
    (output / "checkpoint-6").mkdir()
    (output / "checkpoint-6" / "notes.txt").write_text("mine")
    train(resumed())
    manifests = [json.loads((run / "checkpoint-6" / "manifest.json").read_text()) for run in (output, whole)]
    assert manifests[0].keys() == manifests[1].keys()
    (output / "checkpoint-6" / "notes.txt").unlink()
    assert damage_of(output / "checkpoint-6") is None


def test_a_checkpoint_is_read_once_as_long_as_it_does_not_change(output, monkeypatch):
    folder, read = output / "checkpoint-4", []
    first_damage = run_checkpoints.first_damage
    monkeypatch.setattr(run_checkpoints, "first_damage", lambda *given: read.append(given) or first_damage(*given))
    assert damage_of(folder) is None and damage_of(folder) is None and len(read) == 1
    flip(folder / "optimizer.pt")
    assert damage_of(folder) == CONTENTS.format("optimizer.pt") and len(read) == 2


def test_all_files_are_on_the_disk_before_the_manifest_is_there(config_for, tmp_path, monkeypatch):
    events: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor):
        events.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def replaced(source, target):
        events.append(("replace", str(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    output = tmp_path / "out"
    train(config_for(output, max_steps=2, save_steps=2))
    folder = output / "checkpoint-2"
    appears = events.index(("replace", str(folder / "manifest.json")))
    before, after = ({path for kind, path in part if kind == "fsync"} for part in (events[:appears], events[appears:]))
    files = {str(path) for path in folder.rglob("*") if path.name != "manifest.json"}
    assert len(files) > 10 and files | {str(folder), str(output)} <= before
    assert any(path.startswith(f"{folder}/.manifest.json.") for path in before)
    assert str(folder) in after


def test_older_checkpoints_stay_where_the_new_one_is_not_what_was_written(config_for, tmp_path, monkeypatch, capsys):
    whole_file = run_checkpoints.whole_file

    @contextlib.contextmanager
    def spoiling(path):
        with whole_file(path) as partial:
            yield partial
        if path.parent.name == "checkpoint-4":
            cut(path.with_name("optimizer.pt"))

    monkeypatch.setattr(run_checkpoints, "whole_file", spoiling)
    output = tmp_path / "out"
    train(config_for(output, max_steps=4, save_steps=2, save_total_limit=1))
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-2"]
    assert last_checkpoint(output) == output / "checkpoint-2" and is_complete(output / "checkpoint-2")
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "was not saved" in line)
    assert line.startswith(f"checkpoint-4 was not saved in {output}: optimizer.pt has ") and line.endswith(
        "is checkpoint-2."
    )


def test_the_best_model_is_taken_from_a_checkpoint_that_is_whole(config_for, tmp_path, capsys, monkeypatch):
    text, output = tmp_path / "held-out.txt", tmp_path / "out"
    text.write_text(" ".join(f"w{3 + i % 9}" for i in range(200)))
    options = {
        **OPTIONS,
        "eval_text": str(text),
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "resume_from_checkpoint": False,
    }
    monkeypatch.setattr("midus_hf.training.run.held_out.held_out_losses", lambda *_: {0: 4.0, 2: 2.0, 4: 1.0, 6: 3.0})

    def spoil(self, *_):
        flip(output / "checkpoint-4" / "model.safetensors")

    monkeypatch.setattr("midus_hf.training.run.callbacks.ProgressTable.close", spoil)
    result = train(config_for(output, **options))
    assert result.best_step == 2
    assert moved(output, output / "checkpoint-2") == set()
    assert f"checkpoint-4, the best, is passed over: {CONTENTS.format('model.safetensors')}" in capsys.readouterr().err

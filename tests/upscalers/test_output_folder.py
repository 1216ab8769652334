"""The output folder appears whole, replaces only what is ours on request, and has one run."""

import json
import os
import re
import shutil

import pytest

from tests.upscalers.checkpoints import REQUEST, SMALL, Recorder, unverified
from tests.upscalers.contents import file_digests
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale
from upscalers.runs.writing import CheckpointFolder


def text(mark):
    return json.dumps({"mark": mark, "upscale": {"method": mark, "plan": [], "base_config": {}, "new_layers": []}})


def checkpoint(folder, mark="old"):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(text(mark))
    return folder


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def write(output, mark="new", **kwargs):
    with CheckpointFolder(output, **kwargs).writing() as partial:
        (partial / "config.json").write_text(text(mark))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_failed_commit_restores_the_old_checkpoint(error, tmp_path, monkeypatch):
    checkpoint(tmp_path / "out")
    rename, folder = os.rename, CheckpointFolder(tmp_path / "out", overwrite=True)

    def fail(source, target, **_):
        if os.fspath(source).endswith("-partial") and os.fspath(target).endswith("out"):
            os.rename = rename
            raise error
        return rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(type(error), match=r"No space left|^$"), folder.writing() as partial:
        (partial / "config.json").write_text(text("new"))
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "config.json").read_text() == text("old")


def test_output_inside_or_around_the_base_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, link, empty = (tmp_path / name for name in ("run", "link", "empty"))
    base = checkpoint(run / "checkpoint-5")
    checkpoint(run / "other")
    (run / "config.json").write_text(text("old"))
    link.symlink_to(base)
    empty.mkdir()
    inside = "is inside the base .*; expected a folder elsewhere"
    for output, overwrite, message in (
        *((output, False, inside) for output in (base / "a" / "b", link)),
        *((output, True, inside) for output in (base, link / "out")),
        (run, True, "run contains the base .*checkpoint-5, which --overwrite would delete"),
        (run / "config.json", True, "config.json is a file, so --overwrite will not"),
        (empty, False, "empty exists"),
        ("", True, "output is ''; expected the folder to make"),
    ):
        with pytest.raises(ValueError, match=message):
            CheckpointFolder(output, base, overwrite)
    assert names(tmp_path) == ["empty", "link", "run"]
    CheckpointFolder(run / "checkpoint-50", base)
    CheckpointFolder(run / "other", base, overwrite=True)
    write(empty, overwrite=True)
    assert (empty / "config.json").read_text() == text("new")


def test_too_little_disk_is_refused_before_work(tmp_path, monkeypatch, base):
    left, aside = tmp_path / ".out.midus-partial", tmp_path / ".out.midus-replaced"
    checkpoint(left, "unfinished")
    checkpoint(aside, "replaced")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 10**6, 10**6))
    message = r"the output needs 0\.06 GB, but .* has 0\.00 GB free. Free some space or choose another disk"
    for output in (tmp_path / "new" / "out", tmp_path / "out"):
        with pytest.raises(ValueError, match=message):
            unverified(base, output)
        assert names(tmp_path) == [left.name, aside.name]


def test_leftovers_of_a_killed_run_count_as_space(tmp_path, monkeypatch, base):
    left = tmp_path / ".out.midus-partial"
    (left / "sub").mkdir(parents=True)
    (left / "model.safetensors").write_bytes(bytes(70_000_000))
    (left / "link").symlink_to(base)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 0, 0))
    before = file_digests(base)
    unverified(base, tmp_path / "out")
    assert names(tmp_path) == ["out"]
    assert file_digests(base) == before


def test_second_run_to_a_locked_output_is_refused(tmp_path, base):
    with CheckpointFolder(tmp_path / "out").writing() as partial:
        (partial / "config.json").write_text(text("first"))
        with pytest.raises(ValueError, match=r"out is being written by another run. Wait for it, or choose"):
            unverified(base, tmp_path / "out")
        write(tmp_path / "other")
    assert (tmp_path / "out" / "config.json").read_text() == text("first")
    assert names(tmp_path) == ["other", "out"]


def test_output_link_is_followed(tmp_path):
    checkpoint(tmp_path / "real" / "out")
    (tmp_path / "link").symlink_to(tmp_path / "real" / "out")
    for mark in ("first", "second"):
        write(tmp_path / "link", mark, overwrite=True)
        assert (tmp_path / "real" / "out" / "config.json").read_text() == text(mark)
    assert (tmp_path / "link").is_symlink()
    assert (names(tmp_path), names(tmp_path / "real")) == (["link", "real"], ["out"])


def project(folder, config="{}"):
    for name in (".git", "src/deep"):
        (folder / name).mkdir(parents=True)
    for name in (".git/HEAD", "src/main.py", "src/deep/x.py", "notes.txt", "README.md"):
        (folder / name).write_text(name)
    (folder / "config.json").write_text(config)
    return folder


NOT_OURS = "was not written by upscale or strip, .*Choose another folder, or remove it"
FOREIGN = "contains files that no checkpoint has, .* delete: .git/HEAD, deep/mine, notes.txt, src/deep/x.py and 2 more; .*Move it"


@pytest.mark.parametrize(("config", "record", "message"), [
    *((config, None, NOT_OURS) for config in ("{}", "no JSON", "[]", '{"upscale": true}')),
    *(("{}", record, NOT_OURS) for record in ("no JSON", '{"midus_hf": "0.1.0"}', "[]")),
    (text("ours"), None, FOREIGN),
])  # fmt: skip
def test_foreign_folder_is_not_replaced(tmp_path, config, record, message):
    output = project(tmp_path / "project", config)
    if record is not None:
        (output / "upscale.json").write_text(record)
    for name in ("vocab.json", "deep"):  # folders, one of which is called like a file
        (output / name).mkdir()
        (output / name / "mine").touch()
    before = file_digests(output)
    with pytest.raises(ValueError, match=f"output {output} {message}"):
        CheckpointFolder(output, overwrite=True)
    assert file_digests(output) == before


def test_files_that_appear_during_work_are_kept(tmp_path):
    checkpoint(tmp_path / "old")
    old = CheckpointFolder(tmp_path / "old", overwrite=True)
    late, later = (CheckpointFolder(tmp_path / name) for name in ("out", "project"))
    with pytest.raises(ValueError, match=r"--overwrite would delete: notes\.txt; expected"), old.writing():
        (tmp_path / "old" / "notes.txt").write_text("mine")
    write(tmp_path / "out", "first")
    with pytest.raises(ValueError, match="out exists; pass --overwrite"), late.writing():
        pass
    with pytest.raises(ValueError, match="project was not written by upscale or strip"), later.writing():
        project(tmp_path / "project")
    assert (names(tmp_path), names(tmp_path / "old")) == (["old", "out", "project"], ["config.json", "notes.txt"])
    assert [(tmp_path / name / "config.json").read_text() for name in ("old", "out")] == [text("old"), text("first")]
    assert (tmp_path / "project" / "notes.txt").read_text() == "notes.txt"


def check(progress):
    assert progress.shown == ["start", "finish"]
    assert progress.balanced
    assert "writing 1 shard" in progress.names[:-1], "the bar of bytes ends before the work does"


@pytest.mark.parametrize(("method", "verify"), [("midus-hml", True), ("midus-hml", False), ("avg-deus", False)])
def test_every_stage_takes_its_announced_steps(shared_base, tmp_path, monkeypatch, method, verify):
    progress, options = Recorder(), SMALL.get(method, {})
    request = {"base": shared_base(), "method": method, "options": options, "verify": verify}
    report = upscale(output=tmp_path / "out", progress=progress, **request)
    check(progress)
    expected = ["checking config and tokenizer", "recording what was done"]
    if verify:
        expected.insert(1, "comparing with the base")
        assert progress.told_of("comparing with the base") == [1] * (4 + report.num_layers + 2)
    assert progress.names[progress.names.index("writing 1 shard") + 1 :] == expected
    progress = Recorder()
    strip(tmp_path / "out", tmp_path / "stripped", progress=progress)
    check(progress)
    assert progress.names == ["writing 1 shard", "checking what was written"]
    monkeypatch.setattr("upscalers.runs.writing._validated", lambda folder: 1 / 0)
    progress = Recorder()
    with pytest.raises(ZeroDivisionError):
        upscale(output=tmp_path / "fails", progress=progress, **request)
    assert progress.shown == ["start", "finish"]


def test_terminal_shows_stages_and_stdout_only_json(base, tmp_path, command, monkeypatch):
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": "120", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    done = command("--base", base, *REQUEST[:2], "--output", tmp_path / "out", *REQUEST[4:-1], "--json")
    assert done.json()["identity"].items() >= {"checked": "logits", "max_abs_diff": 0.0}.items()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", done.err)
    assert re.search(r"(?s)writing 1 shard.*comparing with the base .* \d+ of 12 layers and heads", shown)

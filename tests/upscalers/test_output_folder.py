"""The output folder appears whole or not at all, replaces only what it was asked to, and belongs to one run at a time."""

import errno
import json
import os
import re
import resource
import shutil
import tempfile

import pytest
import torch

from tests.upscalers.checkpoints import file_digests, logits, unverified
from upscalers.request.errors import RequestError
from upscalers.runs.output_folder import OutputFolder
from upscalers.runs.strip import strip


def text(mark):
    """A config that has our entry."""
    return json.dumps({"mark": mark, "upscale": {"method": mark, "plan": [], "base_config": {}, "new_layers": []}})


def checkpoint(folder, mark="old"):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(text(mark))
    return folder


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def write(output, mark="new", **kwargs):
    folder = OutputFolder(output, **kwargs)
    with folder as partial:
        (partial / "config.json").write_text(text(mark))
        folder.commit()


def test_a_commit_that_fails_puts_the_old_checkpoint_back(tmp_path, monkeypatch):
    checkpoint(tmp_path / "out")
    rename = os.rename
    folder = OutputFolder(tmp_path / "out", overwrite=True)

    def full_disk(source, target, **_):
        if os.fspath(source).endswith(".partial") and os.fspath(target).endswith("out"):
            os.rename = rename
            raise OSError(28, "No space left on device")
        return rename(source, target)

    monkeypatch.setattr(os, "rename", full_disk)
    with pytest.raises(OSError, match="No space left"), folder as partial:
        (partial / "config.json").write_text(text("new"))
        folder.commit()
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "config.json").read_text() == text("old")


def test_an_empty_folder_may_be_replaced_on_request(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(RequestError, match="exists"):
        OutputFolder(tmp_path / "out")
    write(tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "config.json").read_text() == text("new")


def test_a_file_is_never_replaced(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RequestError, match="file is a file, so --overwrite will not delete it"):
        OutputFolder(tmp_path / "file", overwrite=True)


def test_the_output_may_lie_neither_inside_the_base_nor_around_it(tmp_path):
    base = checkpoint(tmp_path / "run" / "checkpoint-5")
    checkpoint(tmp_path / "run" / "other")
    (tmp_path / "run" / "config.json").write_text(text("old"))
    (tmp_path / "link").symlink_to(base)
    for inside in (base, base / "out", base / "a" / "b", tmp_path / "link", tmp_path / "link" / "out"):
        for overwrite in (True, False):
            with pytest.raises(RequestError, match=r"lies inside the base .*; expected a folder elsewhere"):
                OutputFolder(inside, base, overwrite)
    with pytest.raises(RequestError, match=r"run holds the base .*checkpoint-5, which --overwrite would delete"):
        OutputFolder(tmp_path / "run", base, overwrite=True)
    OutputFolder(tmp_path / "run" / "checkpoint-50", base)
    OutputFolder(tmp_path / "run" / "other", base, overwrite=True)


def test_too_little_disk_is_told_before_work_begins_and_nothing_is_removed(tmp_path, monkeypatch, base):
    left, aside = tmp_path / ".out.midus-0123abcd.partial", tmp_path / ".out.midus-0123abcd.replaced"
    checkpoint(left, "unfinished")
    checkpoint(aside, "replaced")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 10**6, 10**6))
    message = r"the output needs 0\.06 GB, but .* has 0\.00 GB free. Make room or choose another disk"
    for output in (tmp_path / "new" / "out", tmp_path / "out"):
        with pytest.raises(RequestError, match=message):
            unverified(base, output)
        assert names(tmp_path) == [left.name, aside.name]


def test_whether_a_file_is_too_large_is_tried_and_leaves_nothing(tmp_path, monkeypatch):
    folder = OutputFolder(tmp_path / "new" / "out")
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, most))
    try:
        assert folder.can_hold_file(999_999) and not folder.can_hold_file(1_000_001)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
    assert folder.can_hold_file(1_000_001) and not folder.can_hold_file(2**63)
    assert names(tmp_path) == []

    def fail(**_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(tempfile, "TemporaryFile", fail)
    with pytest.raises(OSError, match="Input/output error"):
        folder.can_hold_file(1)


def test_of_two_runs_that_begin_at_once_one_at_most_writes(tmp_path, monkeypatch):
    """The second begins when the first has made its folder and looks for others."""
    first, second, seen = OutputFolder(tmp_path / "out"), OutputFolder(tmp_path / "out"), []
    look = OutputFolder._abandoned

    def begin_another(folder):
        if folder is first and not seen:
            seen.append(True)
            with pytest.raises(RequestError, match="being written by another run"), second:
                pass
        return look(folder)

    monkeypatch.setattr(OutputFolder, "_abandoned", begin_another)
    with first as partial:
        (partial / "config.json").write_text(text("first"))
        first.commit()
    assert seen and names(tmp_path) == ["out"] and (tmp_path / "out" / "config.json").read_text() == text("first")


def test_what_a_killed_run_left_counts_as_room_and_is_removed(tmp_path, monkeypatch, base):
    left = tmp_path / ".out.midus-0123abcd.partial"
    (left / "sub").mkdir(parents=True)
    (left / "model.safetensors").write_bytes(bytes(70_000_000))
    (left / "link").symlink_to(base)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 0, 0))
    before = file_digests(base)
    unverified(base, tmp_path / "out")
    assert names(tmp_path) == ["out"]
    assert torch.equal(logits(base), logits(tmp_path / "out"))
    assert file_digests(base) == before


@pytest.mark.parametrize(
    "name", [".out.partial", ".out.midus-mine.partial", ".out.midus-0123456g.partial", ".other.midus-0123abcd.partial"]
)
def test_a_persons_folder_of_a_name_like_those_of_ours_is_left_untouched(tmp_path, name):
    checkpoint(tmp_path / name, "a person's")
    write(tmp_path / "out")
    assert names(tmp_path) == sorted([name, "out"])
    assert (tmp_path / name / "config.json").read_text() == text("a person's")


def test_a_second_run_to_the_same_output_is_refused_while_the_first_is_alive(tmp_path, base):
    first = OutputFolder(tmp_path / "out")
    with first as partial:
        (partial / "config.json").write_text(text("first"))
        with pytest.raises(
            RequestError, match=r"out is being written by another run. Wait for it, or choose another folder"
        ):
            unverified(base, tmp_path / "out")
        unverified(base, tmp_path / "other")
        assert (partial / "config.json").read_text() == text("first")
        first.commit()
    assert (tmp_path / "out" / "config.json").read_text() == text("first")
    assert names(tmp_path) == ["other", "out"]


def test_a_lock_that_fails_otherwise_is_no_leave_to_go_on(tmp_path, monkeypatch):
    def failing(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("fcntl.flock", failing)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        write(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_where_the_file_system_has_no_locks_a_run_goes_on_and_says_so(tmp_path, monkeypatch, capsys, number):
    def none(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", none)
    write(tmp_path / "out")
    assert names(tmp_path) == ["out"] and (tmp_path / "out" / "config.json").read_text() == text("new")
    assert capsys.readouterr().err == (
        f"output {tmp_path / 'out'} is not guarded: its file system has no locks. Let no other run write it meanwhile.\n"
    )


def test_a_run_that_was_planned_before_another_finished_does_not_replace_its_output(tmp_path):
    late = OutputFolder(tmp_path / "out")
    write(tmp_path / "out", "first")
    with pytest.raises(RequestError, match="out exists; pass --overwrite"), late:
        pass
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "config.json").read_text() == text("first")


def test_every_file_is_forced_to_the_disk_before_the_folder_is_in_its_place(tmp_path, monkeypatch, base):
    synced = set()
    fsync = os.fsync

    def watched(descriptor):
        synced.add(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    unverified(base, tmp_path / "out", max_shard_size="40KB")
    assert {path.name for path in (tmp_path / "out").rglob("*")} <= synced
    assert any(re.fullmatch(r"\.out\.midus-\w+\.partial", name) for name in synced)


def test_an_output_without_a_name_is_not_the_folder_that_one_is_in(tmp_path, monkeypatch, base):
    unverified(base, tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match="output is ''; expected the folder to make"):
        strip(tmp_path / "out", "", overwrite=True)
    assert names(tmp_path) == ["out"]


def test_a_link_stands_for_what_it_points_to(tmp_path):
    checkpoint(tmp_path / "real" / "out")
    (tmp_path / "link").symlink_to(tmp_path / "real" / "out")
    for mark in ("first", "second", "third"):
        write(tmp_path / "link", mark, overwrite=True)
        assert (tmp_path / "real" / "out" / "config.json").read_text() == text(mark)
    assert (tmp_path / "link").is_symlink()
    assert names(tmp_path) == ["link", "real"]
    assert names(tmp_path / "real") == ["out"]

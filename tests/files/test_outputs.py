"""Whole files take their places at once, unfinished ones leave nothing; one process writes."""

import contextlib
import errno
import os
import signal
from pathlib import Path

import pytest

from midus_hf.files.outputs import OutputFolder, as_disk_error, atomic_write, exclusive, unfinished_path


def test_atomic_write_replaces_only_when_complete(tmp_path):
    path = tmp_path / "record.json"
    path.write_text("old")
    for error in (KeyError, KeyboardInterrupt):
        with pytest.raises(error), atomic_write(path) as partial:
            partial.write_text("half")
            raise error
        assert path.read_text() == "old"
        assert list(tmp_path.iterdir()) == [path]
    with atomic_write(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
        assert partial.parent == path.parent
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_killed_write_leaves_nothing_to_the_next(tmp_path):
    child = os.fork()
    if not child:
        with atomic_write(tmp_path / "record.json") as partial:
            partial.write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (left,) = tmp_path.iterdir()
    assert left.name == ".record.json.midus-partial"
    assert left.read_text() == "half"
    with atomic_write(tmp_path / "record.json") as partial, partial.open("a") as file:
        file.write("new")
    assert (tmp_path / "record.json").read_text() == "new"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("writing", [atomic_write, lambda path: OutputFolder(path).writing()], ids=["file", "folder"])
@pytest.mark.parametrize("fails", [False, True])
def test_user_files_of_similar_names_stay(writing, fails, tmp_path):
    names = (".record.partial", ".record.midus-mine", "record.midus-partial", ".other.midus-partial")
    for name in names:
        (tmp_path / name).write_text("mine")
    with contextlib.suppress(KeyError), writing(tmp_path / "record"):
        if fails:
            raise KeyError
    assert [(tmp_path / name).read_text() for name in names] == ["mine"] * 4


def test_concurrent_write_is_refused(tmp_path):
    path = tmp_path / "record.json"
    with atomic_write(path) as first:
        first.write_text("first")
        with pytest.raises(ValueError, match="is being written by another process"), atomic_write(path):
            pass
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_written_file_has_usual_permissions(tmp_path):
    before = os.umask(0o027)
    try:
        with atomic_write(tmp_path / "record.json") as partial:
            partial.write_text("new")
    finally:
        os.umask(before)
    assert (tmp_path / "record.json").stat().st_mode & 0o777 == 0o640


def test_later_writer_is_left_alone(tmp_path, monkeypatch):
    replace, rename = os.replace, Path.rename

    def renamed(partial, path):
        rename(partial, path)
        partial.mkdir()
        (partial / "weights").write_text("another")

    monkeypatch.setattr(os, "replace", lambda old, new: replace(old, new) or Path(old).write_text("another"))
    monkeypatch.setattr(Path, "rename", renamed)
    with atomic_write(tmp_path / "record.json") as file:
        file.write_text("mine")
    with OutputFolder(tmp_path / "out").writing() as folder:
        (folder / "weights").write_text("mine")
    assert (tmp_path / "record.json").read_text() == (tmp_path / "out" / "weights").read_text() == "mine"
    assert unfinished_path(tmp_path / "record.json").read_text() == "another"
    assert (unfinished_path(tmp_path / "out") / "weights").read_text() == "another"


def test_folder_has_one_writer_at_a_time(tmp_path):
    folder, busy = tmp_path / "deep" / "out", ValueError("busy")
    with exclusive(folder, busy):
        with pytest.raises(ValueError, match="busy"), exclusive(folder, busy):
            pass
        child = os.fork()  # which has the lock's descriptor, and outlives the context
        if not child:
            signal.pause()
    try:
        with exclusive(folder, busy):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_missing_file_locks_give_a_note(tmp_path, monkeypatch, capsys):
    def none(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", none)
    with exclusive(tmp_path, ValueError("busy")), atomic_write(tmp_path / "record.json") as partial:
        partial.write_text("new")
    assert (tmp_path / "record.json").read_text() == "new"
    line = f"{tmp_path} is not locked: its file system has no locks. Do not let another run write to it.\n"
    assert capsys.readouterr().err == line


def test_full_disk_is_reported_without_home(no_home, monkeypatch):
    monkeypatch.delenv("HF_HOME", raising=False)
    assert "No space left on device" in str(as_disk_error(OSError(errno.ENOSPC, "No space left on device")))

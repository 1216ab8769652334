"""Files that are written whole take their places at once, and nothing is left of what is not; one process writes at a time."""

import contextlib
import errno
import os
import signal
from pathlib import Path

import pytest

from midus_hf.files.outputs import OutputFolder, atomic_write, exclusive, unfinished_path


def test_it_takes_the_place_of_the_old_one_when_it_is_complete_and_not_after_an_error(tmp_path):
    path = tmp_path / "record.json"
    path.write_text("old")
    with pytest.raises(KeyError), atomic_write(path) as partial:
        partial.write_text("half")
        raise KeyError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with atomic_write(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old" and partial.parent == path.parent
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_half_of_a_file_that_a_killed_process_left_is_no_part_of_the_next_one(tmp_path):
    child = os.fork()
    if not child:
        with atomic_write(tmp_path / "record.json") as partial:
            partial.write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (left,) = tmp_path.iterdir()
    assert left.name == ".record.json.midus-partial" and left.read_text() == "half"
    with atomic_write(tmp_path / "record.json") as partial, partial.open("a") as file:
        file.write("new")
    assert (tmp_path / "record.json").read_text() == "new" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("writing", [atomic_write, lambda path: OutputFolder(path).writing()], ids=["file", "folder"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_persons_files_of_names_like_those_of_ours_are_left_untouched(writing, fails, tmp_path):
    names = (".record.partial", ".record.midus-mine", "record.midus-partial", ".other.midus-partial")
    for name in names:
        (tmp_path / name).write_text("mine")
    with contextlib.suppress(KeyError), writing(tmp_path / "record"):
        if fails:
            raise KeyError
    assert [(tmp_path / name).read_text() for name in names] == ["mine"] * 4


def test_what_another_process_writes_for_the_same_place_is_left_to_it(tmp_path):
    path = tmp_path / "record.json"
    with atomic_write(path) as first:
        first.write_text("first")
        with pytest.raises(ValueError, match="is being written by another process"), atomic_write(path):
            pass
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]


def test_who_may_read_a_file_is_as_for_any_other(tmp_path):
    before = os.umask(0o027)
    try:
        with atomic_write(tmp_path / "record.json") as partial:
            partial.write_text("new")
    finally:
        os.umask(before)
    assert (tmp_path / "record.json").stat().st_mode & 0o777 == 0o640


def test_what_another_process_begins_once_a_file_or_folder_was_moved_is_left_to_it(tmp_path, monkeypatch):
    replace, rename = os.replace, Path.rename

    def replaced(partial, path):
        replace(partial, path)
        Path(partial).write_text("another")

    def renamed(partial, path):
        rename(partial, path)
        partial.mkdir()
        (partial / "weights").write_text("another")

    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(Path, "rename", renamed)
    with atomic_write(tmp_path / "record.json") as file:
        file.write_text("mine")
    with OutputFolder(tmp_path / "out").writing() as folder:
        (folder / "weights").write_text("mine")
    assert (tmp_path / "record.json").read_text() == (tmp_path / "out" / "weights").read_text() == "mine"
    assert unfinished_path(tmp_path / "record.json").read_text() == "another"
    assert (unfinished_path(tmp_path / "out") / "weights").read_text() == "another"


def test_one_has_a_folder_at_a_time(tmp_path):
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


def test_without_locks_in_the_file_system_work_goes_on_and_a_line_says_so(tmp_path, monkeypatch, capsys):
    def none(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", none)
    with exclusive(tmp_path, ValueError("busy")), atomic_write(tmp_path / "record.json") as partial:
        partial.write_text("new")
    assert (tmp_path / "record.json").read_text() == "new"
    line = f"{tmp_path} is not locked: its file system has no locks. Do not let another run write to it.\n"
    assert capsys.readouterr().err == line

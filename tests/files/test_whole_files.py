"""Files that are written whole take their places at once, and nothing is left of what is not; nor does a loss of power undo it."""

import contextlib
import errno
import os
import signal
from pathlib import Path

import pytest

from midus_hf.files.whole_files import move_into_place, whole_file


@pytest.fixture
def on_the_disk(monkeypatch) -> list[tuple[str, str]]:
    """What happened, in order: which files and folders were forced to the disk, and which names were given."""
    happened: list[tuple[str, str]] = []
    honest = os.replace

    def replace(source, target):
        happened.append(("named", Path(target).name))
        honest(source, target)

    def fsync(descriptor):
        happened.append(("synced", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(os, "fsync", fsync)
    return happened


def test_it_is_there_when_it_is_complete(tmp_path):
    path = tmp_path / "record.json"
    path.write_text("old")
    with whole_file(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old" and partial.parent == path.parent
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_after_an_error_the_old_one_stays_alone(tmp_path):
    path = tmp_path / "record.json"
    path.write_text("old")
    with pytest.raises(KeyError), whole_file(path) as partial:
        partial.write_text("half")
        raise KeyError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_half_of_a_file_that_a_killed_process_left_is_removed_by_the_next_one(tmp_path):
    child = os.fork()
    if not child:
        with whole_file(tmp_path / "record.json") as partial:
            partial.write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(list(tmp_path.iterdir())) == 1
    with whole_file(tmp_path / "record.json") as partial, partial.open("a") as file:
        file.write("new")
        assert list(tmp_path.iterdir()) == [partial]
    assert (tmp_path / "record.json").read_text() == "new" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "name",
    [
        ".record.json.partial",
        ".record.json.replaced",
        "record.json.partial",
        ".record.json.midus-mine.partial",
        ".record.json.midus-0123456g.partial",
        ".other.json.midus-01234567.partial",
        ".record.json.midus-01234567.partial/notes.txt",
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_a_persons_file_of_a_name_like_those_of_ours_is_left_untouched(name, fails, tmp_path):
    theirs = folder(tmp_path / name.partition("/")[0], **{"notes.txt": "mine"}) if "/" in name else tmp_path / name
    if not theirs.exists():
        theirs.write_text("mine")
    with contextlib.suppress(KeyError), whole_file(tmp_path / "record.json") as partial:
        partial.write_text("new")
        if fails:
            raise KeyError
    assert (tmp_path / name).read_text() == "mine"


def test_what_another_process_writes_for_the_same_place_is_left_to_it(tmp_path):
    path = tmp_path / "record.json"
    with whole_file(path) as first:
        first.write_text("first")
        with whole_file(path) as second:
            second.write_text("second")
            assert first.read_text() == "first" and first != second
        assert path.read_text() == "second"
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]


def test_who_may_read_a_file_is_as_for_any_other(tmp_path):
    before = os.umask(0o027)
    try:
        with whole_file(tmp_path / "record.json") as partial:
            partial.write_text("new")
    finally:
        os.umask(before)
    assert (tmp_path / "record.json").stat().st_mode & 0o777 == 0o640


def test_where_the_file_system_has_no_locks_nothing_is_taken_for_abandoned(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", none)
    other = tmp_path / ".record.json.midus-01234567.partial"
    other.write_text("perhaps another process is at it")
    with whole_file(tmp_path / "record.json") as partial:
        partial.write_text("new")
    assert (tmp_path / "record.json").read_text() == "new" and other.exists()


def test_it_is_on_the_disk_before_it_takes_its_place_and_its_name_is_afterwards(tmp_path, on_the_disk):
    with whole_file(tmp_path / "record.json") as partial:
        partial.write_text("new")
    assert on_the_disk == [("synced", partial.name), ("named", "record.json"), ("synced", tmp_path.name)]


def folder(path: Path, **files: str) -> Path:
    """A folder with files, by their names with `_` for a slash."""
    for name, text in files.items():
        file = path / name.replace("_", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return path


def test_what_vouches_for_a_folder_appears_when_the_rest_is_on_the_disk(tmp_path, on_the_disk):
    source = folder(tmp_path / "made", config="new", a="new", z="new", inner_b="new")
    target = folder(tmp_path / "out", config="old", a="old")
    move_into_place(source, target, last="config")
    at = on_the_disk.index
    for name in ("a", "z", "b", "inner", "config"):
        assert at(("synced", name)) < at(("named", "a")), "contents come first"
    assert on_the_disk[at(("named", "a")) - 1] == ("synced", "out"), "the old config is gone before anything changes"
    others = [("named", "a"), ("named", "inner"), ("named", "z")]
    assert on_the_disk[at(("named", "a")) :] == [
        *others,
        ("synced", "out"),
        ("named", "config"),
        ("synced", "out"),
    ]
    assert not source.exists() and {path.name for path in target.iterdir()} == {"a", "z", "inner", "config"}
    assert (target / "a").read_text() == (target / "config").read_text() == "new"


def test_a_folder_is_replaced_as_a_whole_and_other_files_stay(tmp_path):
    source = folder(tmp_path / "made", banks_b="new")
    target = folder(tmp_path / "out", banks_a="old", notes="a person's")
    move_into_place(source, target, last="config")
    assert [path.name for path in (target / "banks").iterdir()] == ["b"]
    assert (target / "notes").read_text() == "a person's" and not source.exists()

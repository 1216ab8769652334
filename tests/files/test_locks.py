"""A lock is one process's, and goes with it, whatever it leaves running."""

import contextlib
import os
import signal

import pytest

from midus_hf.files.locks import Lock


def is_free(path) -> bool:
    try:
        Lock(path).release()
    except BlockingIOError:
        return False
    return True


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_one_has_it_at_a_time(tmp_path, kind):
    path = tmp_path / "place"
    path.touch() if kind == "file" else path.mkdir()
    lock = Lock(path)
    assert not is_free(path) and lock.is_on(path)
    lock.release()
    lock.release()
    assert is_free(path) and not lock.is_on(path)


def test_one_that_is_forgotten_is_released(tmp_path):
    lock = Lock(tmp_path)
    assert not is_free(tmp_path)
    del lock
    assert is_free(tmp_path)


def test_it_moves_with_what_it_is_on(tmp_path):
    (tmp_path / "one").mkdir()
    lock = Lock(tmp_path / "one")
    (tmp_path / "one").rename(tmp_path / "two")
    assert lock.is_on(tmp_path / "two") and not lock.is_on(tmp_path / "one")
    (tmp_path / "one").mkdir()
    assert not lock.is_on(tmp_path / "one")


def test_of_a_process_that_is_killed_it_goes_though_what_that_forked_lives_on(tmp_path):
    reader, tell = os.pipe()
    process = os.fork()
    if process == 0:
        with contextlib.suppress(BaseException):
            lock = Lock(tmp_path)
            child = os.fork()
            os.write(tell, f"{child or os.getpid()} {lock.is_on(tmp_path)}\n".encode())
            signal.pause()
        os._exit(1)
    lines = b""
    while lines.count(b"\n") < 2:
        lines += os.read(reader, 100)
    child = int(lines.split()[0])
    try:
        assert {line.split()[1] for line in lines.splitlines()} == {b"True", b"False"}, "the child has none"
        assert not is_free(tmp_path)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        process = 0
        os.kill(child, 0)
        assert is_free(tmp_path)
    finally:
        for each in filter(None, (process, child)):
            os.kill(each, signal.SIGKILL)
        os.close(reader)
        os.close(tell)

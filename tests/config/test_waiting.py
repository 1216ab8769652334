"""Processes that work on the same thing wait for one another."""

import errno
import os
import subprocess
import time

import pytest

from midus_hf.files.locks import alone


def test_who_inherits_a_lock_holds_it_until_it_ends(tmp_path):
    began = time.monotonic()
    with alone(tmp_path) as held:
        inheriting = subprocess.Popen(["sleep", "0.5"], pass_fds=(held,))
        other = subprocess.Popen(["sleep", "60"])
    try:
        with alone(tmp_path):
            assert time.monotonic() - began > 0.4 and other.poll() is None
    finally:
        other.kill()
        other.wait()
        inheriting.wait()


def test_another_folder_is_held_beside_it_and_the_same_again_afterwards(tmp_path):
    (tmp_path / "other").mkdir()
    for _ in range(2):
        with alone(tmp_path), alone(tmp_path / "other"):
            pass


def test_where_the_file_system_has_no_locks_nobody_waits(tmp_path, monkeypatch):
    def failing(number):
        def flock(*_):
            raise OSError(number, os.strerror(number))

        return flock

    monkeypatch.setattr("fcntl.flock", failing(errno.ENOLCK))
    with alone(tmp_path), alone(tmp_path) as descriptor:
        assert os.fstat(descriptor)
    monkeypatch.setattr("fcntl.flock", failing(errno.EIO))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)), alone(tmp_path):
        pass

"""Processes that work on the same thing wait for one another."""

import subprocess
import time

from midus_config.locks import alone


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

"""A run that is alive is alone in its output; one that has ended, however, is in nobody's way."""

import errno
import os
import re
import shutil
from pathlib import Path

import pytest
from processes.warm import run_ranks, run_warm
from training.steered_runs import AtStep
from training.tiny_run import refused, tiny_config
from training.two_processes import SCRIPT

from midus_hf.files import locks
from midus_hf.files.locks import Lock, check_not_held, hold_output
from midus_hf.training.output import output_folder
from midus_hf.training.output.output_folder import check_output, start_output
from midus_hf.training.run.train import prepare, train

REFUSED = r"output '.*out' is being written by another run\. Wait for it, or choose another folder\."
RUNS = """
import sys
from midus_hf.cli.training.train import main
print([main([*sys.argv[1:], *words]) for words in ([], ["resume_from_checkpoint=true"], ["overwrite_output_dir=true"])])
"""


def state_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def elsewhere(tmp_path):
    """Does something with the output in a process of its own; whether that was refused."""

    def did(work) -> bool:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                work(tmp_path / "out")
                status = 0
            except ValueError as error:
                status = 2 if re.fullmatch(REFUSED, str(error)) else 1
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, 2)
        return status == 2

    return did


def test_other_processes_are_refused_in_a_line_while_a_run_goes_on_and_write_nothing(config_for, words, tmp_path):
    output, done = tmp_path / "out", []
    run = prepare(config_for(output, max_steps=3, save_steps=1))

    def others(model) -> None:
        before = state_of(output)
        done.append(run_warm(RUNS, *words, "max_steps=3"))
        assert state_of(output) == before

    run.trainer.add_callback(AtStep(2, others))
    assert run.execute().steps == 3
    (refused,) = done
    assert refused.stdout == "[2, 2, 2]\n"
    lines = [line for line in refused.stderr.splitlines() if "is being written" in line]
    assert len(lines) == 3 and all(re.search(REFUSED, line) for line in lines), refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_run_of_several_processes_holds_its_output_and_refuses_others_in_one_line(words, tmp_path):
    words, output = [*words, "max_steps=3"], tmp_path / "out"
    output.mkdir()
    lock = Lock(output)
    refused = run_ranks(SCRIPT, *words)
    lock.release()
    assert refused.returncode == 2 and len(re.findall(REFUSED, refused.stderr)) == 1
    assert "Traceback" not in refused.stderr and not list(output.iterdir())
    held = run_ranks(SCRIPT, *words)
    assert held.returncode == 0 and (output / "config.json").exists(), held.stderr


def test_it_holds_from_when_it_is_ready_until_it_ends(config_for, tmp_path, elsewhere):
    run = prepare(config_for(max_steps=1))
    assert elsewhere(check_not_held) and elsewhere(hold_output)
    check_not_held(tmp_path / "out")
    run.execute()
    assert not elsewhere(check_not_held) and not elsewhere(hold_output)


def test_a_run_that_fails_lets_go(config_for, elsewhere):
    run = prepare(config_for(max_steps=3))
    run.trainer.add_callback(AtStep(2, lambda model: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        run.execute()
    assert not elsewhere(hold_output)


def test_in_one_process_a_run_that_was_never_started_gives_way_to_the_next(config_for, elsewhere):
    config = config_for(max_steps=1, overwrite_output_dir=True)
    abandoned = prepare(config)
    run = prepare(config)
    assert run.lock is abandoned.lock and elsewhere(hold_output)
    run.execute()
    assert not elsewhere(hold_output)


def test_who_only_looks_is_in_nobodys_way(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    looking = Lock(tmp_path / "out", shared=True)
    check_not_held(tmp_path / "out")
    monkeypatch.setattr(locks.time, "sleep", lambda _: looking.release())
    assert hold_output(tmp_path / "out") is not None


def test_where_the_file_system_has_no_locks_nobody_is_refused(tmp_path, monkeypatch, capsys):
    def none(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", none)
    assert hold_output(tmp_path) is None
    assert capsys.readouterr().err.startswith(f"output {tmp_path} is not guarded: its file system has no locks.")
    check_not_held(tmp_path)


def test_a_lock_that_fails_otherwise_is_no_leave_to_train(tmp_path, monkeypatch):
    def failing(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("fcntl.flock", failing)
    for look in (hold_output, check_not_held):
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            look(tmp_path)


def test_a_run_that_began_meanwhile_is_not_written_over(tmp_path, monkeypatch):
    output = tmp_path / "out"
    config = tiny_config(tmp_path / "model", tmp_path / "corpus", output)
    assert check_output(config) is None
    output.mkdir()
    lock = Lock(output)
    monkeypatch.setattr(locks, "_SECONDS_BETWEEN", 0)
    with refused(REFUSED):
        start_output(config, config, None)
    assert not list(output.iterdir())
    (output / "train_config.yaml").write_text("another run")
    lock.release()
    with refused(r"which exists; choose another, or set resume_from_checkpoint or overwrite_output_dir: true\."):
        start_output(config, config, None)
    assert (output / "train_config.yaml").read_text() == "another run"


def test_a_refusal_at_the_last_moment_is_a_wrong_request(config_for, tmp_path, monkeypatch):
    monkeypatch.setattr(output_folder, "check_not_held", lambda output: None)
    monkeypatch.setattr(locks, "_SECONDS_BETWEEN", 0)
    (tmp_path / "out").mkdir()
    lock = Lock(tmp_path / "out")
    with refused(REFUSED):
        train(config_for(max_steps=1))
    assert not list((tmp_path / "out").iterdir())
    lock.release()
    shutil.rmtree(tmp_path / "out")
    assert train(config_for(max_steps=1)).steps == 1

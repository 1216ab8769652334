"""All steps of a GPU: what they are, how they end, and what is left of them."""

import argparse
import sys
import time

import pytest

from benchmarks.gpu.run import FURTHER_STEPS, STEPS, Done, Step, run, run_step, steps, write_summary


def python(name: str, code: str) -> Step:
    return Step(name, [sys.executable, "-c", code], "something")


def test_steps_go_on_where_they_were_cut_off_and_end_in_time(tmp_path):
    made = steps(tmp_path, 540)
    assert [step.name for step in made] == STEPS + FURTHER_STEPS
    for step in made[2:]:
        assert {"--resume", "--profile"} <= set(step.command)
        assert step.command[step.command.index("--results") + 1] == str(tmp_path)
        assert float(step.command[step.command.index("--budget") + 1]) < 540
        assert step.command[step.command.index("--device") + 1] == "cuda"


def test_a_test_file_that_needs_an_absent_package_keeps_no_other_from_being_run(tmp_path):
    (tmp_path / "test_absent.py").write_text("import a_package_that_is_not_there\n")
    (tmp_path / "test_kernel.py").write_text("def test_kernel():\n    pass\n")
    (tests,) = (step for step in steps(tmp_path, 540) if step.name == "tests")
    command = [str(tmp_path) if word == "tests/ops" else word for word in tests.command]
    done = run_step(Step("tests", [*command, "--noconftest", "--rootdir", str(tmp_path)], ""), tmp_path, 60)
    assert done.status == 1
    assert "1 passed, 1 error" in done.last_lines[-1]


def test_what_a_step_prints_is_shown_and_kept(tmp_path, capsys):
    done = run_step(python("ops", "import sys; print('one'); print('two', file=sys.stderr)"), tmp_path, 60)
    assert (done.status, done.last_lines) == (0, ("one", "two"))
    log = (tmp_path / "log.txt").read_text()
    assert log.startswith("ops: ") and log.endswith("\none\ntwo\n")
    assert "one\ntwo\n" in capsys.readouterr().err
    assert run_step(python("ops", "raise SystemExit(3)"), tmp_path, 60).status == 3
    assert (tmp_path / "log.txt").read_text().startswith(log)  # of an earlier call, too


def test_a_step_whose_time_is_up_is_ended_with_all_that_it_began(tmp_path):
    code = (
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print('begun', flush=True)\n"
        "time.sleep(60)"
    )
    began = time.monotonic()
    done = run_step(python("ops", code), tmp_path, 1)
    assert time.monotonic() - began < 20
    assert (done.status, done.last_lines) == (None, ("begun",))


def test_the_summary_says_how_each_step_ended_and_what_it_printed_last(tmp_path):
    write_summary(
        tmp_path,
        [
            Done(python("tests", ""), 0, 12.3, ("80 passed",)),
            Done(python("ops", ""), 1, 4.0, ("first", "TypeError: broken")),
            Done(python("1b", ""), None, 540.0, ()),
        ],
    )
    text = (tmp_path / "summary.md").read_text()
    assert text.startswith("# Measured on a GPU\n")
    assert "| tests | well | 12 | something | 80 passed |" in text
    assert "| ops | with status 1 | 4 |" in text and "first\nTypeError: broken\n```" in text
    assert "| 1b | out of time | 540 |" in text
    assert "Not measured." in text and "Not profiled." in text


def test_an_unknown_step_is_refused(tmp_path):
    arguments = argparse.Namespace(steps=["3b"], out=tmp_path, seconds=60)
    with pytest.raises(
        SystemExit,
        match="step is '3b'; expected some of ceilings, tests, ops, 1b, 8b, compiled, sizes",
    ):
        run(arguments)

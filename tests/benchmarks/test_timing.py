"""Times and peaks on a CPU."""

import time

import pytest
import torch

from benchmarks.timing import Task, Timing, interleaved, is_out_of_memory, peak_bytes, percentile
from benchmarks.tracked import append, commit, read, this_run


def test_percentiles_are_interpolated():
    assert [percentile([1.0, 2.0, 3.0], percent) for percent in (0, 25, 50, 100)] == [1.0, 1.5, 2.0, 3.0]
    assert Timing.of([3.0, 1.0, 2.0]) == Timing(2.0, pytest.approx(1.4), pytest.approx(2.6), 3)


def test_tasks_take_turns_and_preparation_is_not_timed():
    order = []
    tasks = {
        "slow to prepare": Task(lambda state: order.append(state), prepare=lambda: time.sleep(0.02) or "a"),
        "slow to run": Task(lambda state: (order.append("b"), time.sleep(0.02))),
    }
    timings = interleaved(tasks, "cpu", seconds=0, fewest=3)
    assert order == ["a", "b"] * 4  # a warm-up and three rounds
    assert timings["slow to prepare"].median_ms < 10
    assert timings["slow to run"].median_ms >= 20
    assert timings["slow to run"].runs == 3


def test_the_peak_is_what_was_held_at_once():
    def run():
        first = torch.ones(1 << 20)
        del first
        second, third = torch.ones(1 << 20), torch.ones(1 << 18)
        return second.shape, third.shape

    assert peak_bytes(run, "cpu") == 4 * ((1 << 20) + (1 << 18))


def test_both_kinds_of_full_memory_are_known():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("other"))


def test_rows_are_appended_only_to_a_file_of_the_same_columns(tmp_path):
    run = this_run("cpu")
    append([run], tmp_path / "a.csv")
    append([run], tmp_path / "a.csv")
    assert [row["device"] for row in read(tmp_path / "a.csv")] == ["cpu", "cpu"]
    assert read(tmp_path / "absent.csv") == []
    (tmp_path / "b.csv").write_text("other,columns\n")
    with pytest.raises(ValueError, match=r"has the columns \['other', 'columns'\]; expected \['date'"):
        append([run], tmp_path / "b.csv")


def test_without_git_the_commit_is_what_the_environment_says(monkeypatch):
    def no_git(*arguments, **keywords):
        raise FileNotFoundError("git")

    monkeypatch.setattr("subprocess.run", no_git)
    assert commit() == "unknown"
    monkeypatch.setenv("BENCH_COMMIT", "abc1234")
    assert commit() == "abc1234"

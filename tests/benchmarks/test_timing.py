"""Times and peaks on a CPU, and times on a GPU that is simulated."""

import dataclasses
import time

import pytest
import torch

from benchmarks.timing import Lap, Stopwatch, Task, Timing, interleaved, is_out_of_memory, peak_bytes, percentile
from benchmarks.tracked import append, commit, read, resumed, this_run
from tests.benchmarks.simulated_gpu import SimulatedGpu


def test_percentiles_are_interpolated():
    assert [percentile([1.0, 2.0, 3.0], percent) for percent in (0, 25, 50, 100)] == [1.0, 1.5, 2.0, 3.0]
    assert Timing.of(map(Lap, [3.0, 1.0, 2.0])) == Timing(2.0, pytest.approx(1.4), pytest.approx(2.6), 3)


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
    assert timings["slow to run"].host_ms is timings["slow to run"].wall_ms is None  # they would repeat the median


@pytest.fixture
def gpu(monkeypatch):
    return SimulatedGpu(monkeypatch)


def _launches(gpu, *times: tuple[float, float]) -> Task:
    return Task(lambda _: [gpu.issue(*each) for each in times])


@pytest.mark.parametrize(
    ("launches", "device_ms", "host_ms", "wall_ms"),
    [
        ([(0.3, 0.02), (0.15, 0.03)], 0.05, 0.45, 0.48),  # the host decides: it issues for longer than the device runs
        ([(0.01, 2.0), (0.01, 3.0)], 5.0, 0.02, 5.01),  # the device decides
        ([(40.0, 0.1)], 0.1, 40.0, 40.1),  # as long as any host takes
    ],
)
def test_device_host_and_wall_time_are_told_apart(launches, device_ms, host_ms, wall_ms, gpu):
    timing = interleaved({"op": _launches(gpu, *launches)}, "cuda", seconds=0)["op"]
    expected = Timing(*[device_ms] * 3, runs=5, host_ms=host_ms, wall_ms=wall_ms, queued=True)
    assert dataclasses.astuple(timing) == pytest.approx(dataclasses.astuple(expected))


def test_a_host_that_is_slower_than_just_before_gets_a_longer_sleep(gpu):
    hosts = iter([1.0, 5.0, 5.0])
    lap = Stopwatch("cuda").lap(Task(lambda _: gpu.issue(next(hosts), 0.1)))
    assert lap.queued
    assert (lap.ms, lap.host_ms) == (pytest.approx(0.1), pytest.approx(1.0))
    assert next(hosts, None) is None  # the run that the device waited in was not taken


def test_a_call_that_waits_for_the_device_is_known_by_it(gpu):
    task = Task(lambda _: (gpu.issue(0.1, 0.2), gpu.synchronize(), gpu.issue(0.1, 0.2)))
    timing = interleaved({"waits": task}, "cuda", seconds=0)["waits"]
    assert not timing.queued
    assert timing.median_ms == pytest.approx(0.5)  # both kernels, and the second launch, which nothing hides


def test_a_long_call_that_waits_for_the_device_costs_little_more_than_its_own_time(gpu):
    lap = Stopwatch("cuda").lap(Task(lambda _: (gpu.issue(0.1, 1000.0), gpu.synchronize())))
    assert not lap.queued
    assert gpu.host_ms < 2500  # two runs of 1000 ms and a sleep, not sleeps of 3000 and 9000 as well


def test_what_prepares_a_run_is_part_of_no_time(gpu):
    prepared = []
    task = Task(lambda _: gpu.issue(0.1, 0.2), prepare=lambda: prepared.append(gpu.issue(3.0, 30.0)))
    lap = Stopwatch("cuda").lap(task)
    assert len(prepared) == 2  # one run by the clock and, as it was queued up at once, one by events
    assert (lap.ms, lap.host_ms, lap.wall_ms) == (pytest.approx(0.2), pytest.approx(0.1), pytest.approx(0.3))


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


@pytest.fixture
def code_of(monkeypatch, tmp_path):
    """Return a function that writes a file of the code that is measured."""
    monkeypatch.setattr("benchmarks.tracked.RESULTS", tmp_path / "benchmarks" / "results")

    def write(text: str, name: str = "kernel.py") -> None:
        path = tmp_path / "midus_hf" / "ops" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    return write


def test_without_git_the_commit_is_what_the_environment_says_or_a_digest_of_the_code(monkeypatch, code_of):
    def no_git(*arguments, **keywords):
        raise FileNotFoundError("git")

    monkeypatch.setattr("subprocess.run", no_git)
    monkeypatch.delenv("BENCH_COMMIT", raising=False)
    commits = []
    for text in ("slow", "fast", "slow"):
        code_of(text)
        commits.append(commit())
    assert commits[0] == commits[2] != commits[1]
    assert all(one.startswith("files-") for one in commits)
    monkeypatch.setenv("BENCH_COMMIT", "abc1234")
    assert commit() == "abc1234"


@pytest.mark.parametrize("name", ["kernel.py", "native.c"])
def test_uncommitted_code_resumes_only_rows_of_the_same_code(name, monkeypatch, code_of, tmp_path):
    monkeypatch.setattr("benchmarks.tracked._git", lambda command, *_: "abc1234" if command == "describe" else " M x")
    results, dates = tmp_path / "rows.csv", {}
    for date, text in (("2026-01-01", "slow"), ("2026-01-02", "fast"), ("2026-01-03", "slow")):
        code_of(text, name)
        this = dataclasses.replace(this_run("cpu"), date=date)
        assert this.commit.startswith("abc1234-dirty-")
        dates[date] = resumed(this, results).date
        append([dataclasses.replace(this, date=dates[date])], results)
    assert dates == {"2026-01-01": "2026-01-01", "2026-01-02": "2026-01-02", "2026-01-03": "2026-01-01"}
    monkeypatch.setattr("benchmarks.tracked._git", lambda command, *_: "abc1234" if command == "describe" else "")
    assert commit() == "abc1234"

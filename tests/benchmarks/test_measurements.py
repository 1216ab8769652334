"""A row a measurement, at once; what was measured is not measured again."""

import gc
import types
import weakref
from collections import Counter

import pytest
import torch

from benchmarks.models.build import build
from benchmarks.models.measure import Measured
from benchmarks.models.points import FILE, SUBJECT
from benchmarks.models.run import run
from benchmarks.timing import PROFILES, KernelTime
from benchmarks.tracked import read, this_run


@pytest.fixture
def two_rounds(model_arguments):
    """Arguments of two rounds over two models, at four main points and one by size."""

    def make(*words):
        chosen = ["--methods", "base,midus-hml", "--placements", "distributed", "--batches", "8", *words]
        arguments = model_arguments(*chosen)
        arguments.quick, arguments.rounds = False, 2
        return arguments

    return make


@pytest.fixture
def measured(monkeypatch):
    """Stands in for measuring, and tells what was asked for; `script` is called at each measurement."""
    asked = []

    def measure(model, variant, point, device, *, with_memory, with_profile):
        asked.append((variant.method, str(point), with_memory, with_profile))
        measured.script(model, variant, point)
        kernels = (KernelTime("a kernel", 3, 1.5),) if with_profile else ()
        return Measured(0.5, peak_bytes=1000 if with_memory else None, profiled="all of it", kernels=kernels)

    measured = types.SimpleNamespace(asked=asked, script=lambda *_: None)
    monkeypatch.setattr("benchmarks.models.run.measure", measure)
    monkeypatch.setattr("benchmarks.models.run.release_memory", lambda device: None)
    return measured


def subject_of(row):
    return tuple(row[name] for name in SUBJECT)


def keys(path):
    return [(*subject_of(row), row["round"]) for row in read(path / FILE)]


def interrupted_at(number):
    count = iter(range(1, number + 1))

    def script(*_):
        if next(count) == number:
            raise KeyboardInterrupt

    return script


@pytest.mark.parametrize("cut", [1, 9])
def test_a_run_that_was_cut_goes_on_where_it_was(cut, two_rounds, measured, tmp_path):
    assert run(two_rounds()) == 0
    whole = keys(tmp_path)
    assert len(whole) == 2 * 2 * 4 + 2
    assert {row["round"] for row in read(tmp_path / FILE)} == {"1", "2"}
    (tmp_path / FILE).unlink()
    measured.script = interrupted_at(cut)
    with pytest.raises(KeyboardInterrupt):
        run(two_rounds())
    written = read(tmp_path / FILE)
    assert len(written) == cut - 1
    measured.script = lambda *_: None
    assert run(two_rounds("--resume")) == 0
    assert Counter(keys(tmp_path)) == Counter(whole)
    rows = read(tmp_path / FILE)
    assert rows[: cut - 1] == written
    if written:
        assert {row["date"] for row in rows} == {written[0]["date"]}
    measured.asked.clear()
    assert run(two_rounds("--resume")) == 0
    assert not measured.asked
    assert len(read(tmp_path / FILE)) == len(whole)


def test_peaks_are_measured_once_also_by_a_run_that_goes_on(two_rounds, measured, tmp_path):
    measured.script = interrupted_at(4)
    with pytest.raises(KeyboardInterrupt):
        run(two_rounds())
    measured.script = lambda *_: None
    assert run(two_rounds("--resume")) == 0
    peaks = Counter(subject_of(row) for row in read(tmp_path / FILE) if row["peak_gb"])
    assert set(peaks.values()) == {1}
    assert len(peaks) == 10
    assert not any(with_profile for *_, with_profile in measured.asked)


def test_profiles_are_kept_of_the_first_round(two_rounds, measured, tmp_path):
    assert run(two_rounds("--phases", "prefill", "--methods", "base", "--profile")) == 0
    rows = read(tmp_path / PROFILES)
    assert [row["subject"] for row in rows] == [
        "tiny-llama base in float32, prefill, batch 1, length 64: all of it",
        "tiny-llama base in float32, prefill, batch 1, length 256: all of it",
    ]
    assert (rows[0]["kernel"], rows[0]["launches"], rows[0]["benchmark"]) == ("a kernel", "3", "model")
    assert rows[0]["date"] == read(tmp_path / FILE)[0]["date"]


def test_too_little_memory_is_a_finding_and_an_error_a_failure(two_rounds, measured, tmp_path):
    def failing(error):
        def script(*_):
            raise error

        measured.script = script
        return run(two_rounds("--methods", "base", "--phases", "generate"))

    assert failing(torch.OutOfMemoryError("CUDA out of memory\nTried to allocate")) == 0
    wrapped = RuntimeError("backend='inductor' raised")
    wrapped.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    assert failing(wrapped) == 0
    assert failing(RuntimeError("broken")) == 1
    rows = read(tmp_path / FILE)
    assert [(row["status"], row["error"]) for row in rows] == [
        ("out of memory", "OutOfMemoryError: CUDA out of memory"),
        ("out of memory", "RuntimeError: backend='inductor' raised"),
        ("failed", "RuntimeError: broken"),
    ]  # each of the first round alone
    assert all(row["seconds"] == row["tokens_per_s"] == row["peak_gb"] == "" for row in rows)
    measured.script = lambda *_: None
    assert run(two_rounds("--methods", "base", "--phases", "generate", "--resume")) == 0
    assert len(read(tmp_path / FILE)) == 3


def test_what_a_failure_held_is_given_back_and_its_model_before_the_next(two_rounds, measured, tmp_path, monkeypatch):
    held, models, alive = [], [], []

    def is_alive(references):
        return any(reference() is not None for reference in references)

    def release(device):
        gc.collect()
        alive.append(is_alive(held))

    def script(model, variant, point):
        if variant.method == "midus-hml":
            alive.append(is_alive(models))
            return
        activations = torch.ones(10)
        held.append(weakref.ref(activations))
        models.append(weakref.ref(model))
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except RuntimeError:
            raise ValueError("while cleaning up") from None

    measured.script = script
    monkeypatch.setattr("benchmarks.models.run.release_memory", release)
    assert run(two_rounds("--phases", "train")) == 0
    rows = read(tmp_path / FILE)
    assert [row["status"] for row in rows if row["method"] == "base"] == ["out of memory"] * 2
    assert [row["status"] for row in rows if row["method"] == "midus-hml"] == ["ok"] * 3
    assert len(held) == len(models) == 2
    assert not any(alive)


def test_a_model_that_cannot_be_built_fails_at_each_point_and_the_next_is_measured(
    two_rounds, measured, tmp_path, monkeypatch
):
    def building(variant, dtype, device):
        if variant.method == "base":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return build(variant, dtype, device)

    monkeypatch.setattr("benchmarks.models.run.build", building)
    assert run(two_rounds("--phases", "prefill")) == 0
    rows = read(tmp_path / FILE)
    assert [(row["method"], row["status"]) for row in rows] == [("base", "out of memory")] * 2 + [
        ("midus-hml", "ok")
    ] * 4


def test_a_gpu_that_is_lost_ends_the_run_behind_the_row_that_says_why(two_rounds, measured, tmp_path, monkeypatch):
    def script(*_):
        monkeypatch.setattr(torch, "randint", lambda *_, **__: broken())
        broken()

    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def release(device):
        if torch.randint is not randint:
            broken()

    randint, measured.script = torch.randint, script
    monkeypatch.setattr("benchmarks.models.run.release_memory", release)
    monkeypatch.setattr("benchmarks.recorded.kernels", lambda run, device: [])
    monkeypatch.setattr("benchmarks.models.run.build", lambda variant, dtype, device: build(variant, dtype, "cpu"))
    monkeypatch.setattr("benchmarks.recorded.this_run", lambda device: this_run("cpu"))
    words = ["--device", "cuda", "--batches", "16", "--phases", "prefill", "--prompts", "8,16"]
    with pytest.raises(SystemExit, match=r"of no more use to this process \(CUDA error.*go on with --resume"):
        run(two_rounds(*words))
    monkeypatch.setattr(torch, "randint", randint)
    measured.script = lambda *_: None
    assert run(two_rounds(*words, "--resume")) == 0
    rows = [(row["method"], row["length"], row["status"]) for row in read(tmp_path / FILE) if row["round"] == "1"]
    assert rows == [("base", "8", "failed"), ("base", "16", "ok"), ("midus-hml", "8", "ok"), ("midus-hml", "16", "ok")]


def test_the_profiler_is_on_once_before_any_model_is_timed_on_a_gpu(two_rounds, measured, monkeypatch):
    profiled = []
    monkeypatch.setattr("benchmarks.recorded.kernels", lambda run, device: profiled.append(device))
    monkeypatch.setattr("benchmarks.recorded.this_run", lambda device: this_run("cpu"))
    for device in ("cuda", "cpu"):
        assert run(two_rounds("--device", device, "--batches", "16", "--budget", "-1")) == 0
        assert profiled == ["cuda"] and not measured.asked


def test_a_spent_budget_begins_no_measurement(two_rounds, measured, tmp_path, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("benchmarks.models.run.time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    def script(*_):
        now[0] += 10

    measured.script = script
    assert run(two_rounds("--phases", "prefill", "--budget", "5")) == 0
    assert len(read(tmp_path / FILE)) == 1
    message = "tiny-llama: out of time in round 1, before base prefill, batch 1, length 256"
    assert message in capsys.readouterr().err
    assert run(two_rounds("--phases", "prefill", "--budget", "-1")) == 0
    assert "tiny-llama: out of time in round 1, before base\n" in capsys.readouterr().err
    assert len(read(tmp_path / FILE)) == 1

"""A run that was cut goes on where it ended, and profiles stand beside its rows."""

import dataclasses
from collections import Counter

import pytest
import torch

from benchmarks.ops.bench import FILE, IDENTITY, Bench, _kernels_of, run
from benchmarks.ops.operations import Unavailable
from benchmarks.ops.shapes import MODES, SHAPES, Case
from benchmarks.recorded import Recorded
from benchmarks.timing import PROFILES, KernelTime, Task
from benchmarks.tracked import append, read, this_run
from midus_hf.ops import headwise_memory
from tests.benchmarks.simulated_gpu import SimulatedGpu

WORDS = ["--ops", "headwise_memory,product_key_topk", "--providers", "naive,embedding-bag"]


def _keys(rows: list[dict[str, str]]) -> Counter:
    return Counter(tuple(row[name] for name in IDENTITY) for row in rows)


def _replace(rows: list[dict[str, str]], results) -> None:
    (results / FILE).unlink()
    append(rows, results / FILE)


@pytest.fixture(autouse=True)
def no_peaks(monkeypatch):
    """Most of the time of a run of this size would go into collecting garbage around them."""
    monkeypatch.setattr("benchmarks.ops.bench.peak_bytes", lambda run, device: 1)
    for module in ("ops.bench", "recorded"):
        monkeypatch.setattr(f"benchmarks.{module}.release_memory", lambda device: None)


def _right(case, inputs):
    return lambda: headwise_memory(**inputs, k=case.shape.k, backend="reference")


@pytest.fixture
def right_and_wrong(register):
    """Three providers: one that is right, one that the gate refuses, one that has too little memory forward."""

    def wrong(case, inputs):
        return lambda: 1.001 * _right(case, inputs)()

    def hungry(case, inputs):
        def call():
            output = _right(case, inputs)()
            if case.tokens == 70 and not torch.is_grad_enabled():
                raise torch.OutOfMemoryError("CUDA out of memory")
            return output

        return call

    register(hungry=hungry, wrong=wrong, right=_right)


@pytest.mark.parametrize("kept", [4, 6, 18])
def test_a_run_that_was_cut_goes_on_to_the_keys_of_a_whole_one(kept, ops_arguments, tmp_path, monkeypatch, capsys):
    assert run(ops_arguments(*WORDS)) == 0
    whole = read(tmp_path / FILE)
    assert set(_keys(whole).values()) == {1}
    assert len(whole) == 2 * (
        6 + 3
    )  # popularities x rows of each op; 6 is the first case, 4 two modes of it, 18 the whole
    _replace(whole[:kept], tmp_path)
    if kept == len(whole):
        monkeypatch.setattr("benchmarks.recorded.interleaved", lambda *_, **__: pytest.fail("measured again"))
    assert run(ops_arguments(*WORDS, "--resume")) == 0
    resumed = read(tmp_path / FILE)
    assert resumed[:kept] == whole[:kept]
    assert _keys(resumed) == _keys(whole)
    assert {row["date"] for row in resumed} == {whole[0]["date"]}
    printed = capsys.readouterr().err
    assert f"goes on with the run of {whole[0]['date']}, which has {kept} rows" in printed
    assert ("headwise_memory tiny 70 tokens uniform float32: measured before" in printed) == (kept >= 6)


def test_nothing_is_resumed_from_another_commit(ops_arguments, tmp_path, capsys):
    assert run(ops_arguments(*WORDS)) == 0
    others = [{**row, "commit": "0000000", "date": "2020-01-01T00:00:00"} for row in read(tmp_path / FILE)]
    _replace(others, tmp_path)
    assert run(ops_arguments(*WORDS, "--resume")) == 0
    assert "no run to go on with" in capsys.readouterr().err
    mine = [row for row in read(tmp_path / FILE) if row["commit"] != "0000000"]
    assert _keys(mine) == _keys(others)
    assert "2020-01-01T00:00:00" not in {row["date"] for row in mine}


@pytest.mark.parametrize("kept", [1, 3])
def test_what_was_refused_or_did_not_fit_is_not_written_twice(kept, right_and_wrong, ops_arguments, tmp_path, capsys):
    words = ["--ops", "headwise_memory", "--popularity", "uniform"]
    assert run(ops_arguments(*words)) == 1
    whole = read(tmp_path / FILE)
    statuses = [(row["provider"], row["mode"], row["status"]) for row in whole[:3]]
    assert statuses == [("wrong", "", "refused"), ("hungry", "forward", "out of memory"), ("right", "forward", "ok")]
    _replace(whole[:kept], tmp_path)
    capsys.readouterr()
    assert run(ops_arguments(*words, "--resume")) == 1  # as a run in one piece
    assert _keys(read(tmp_path / FILE)) == _keys(whole)
    assert "FAILED headwise_memory tiny 70 uniform float32 wrong : refused before" in capsys.readouterr().err


def test_profiles_are_of_ours_and_the_rivals_on_the_first_popularity(register, ops_arguments, tmp_path):
    register(naive=_right, sorted=_right, compiled=_right)
    words = ["--ops", "headwise_memory", "--popularity", "zipf,uniform"]
    assert run(ops_arguments(*words, "--profile")) == 0
    rows = read(tmp_path / PROFILES)
    assert {row["benchmark"] for row in rows} == {"ops"}
    case = "headwise_memory tiny 70 tokens zipf float32"
    expected = [f"{case}, {name} {mode}" for name in ("sorted", "compiled") for mode in MODES]
    assert {row["subject"] for row in rows} == set(expected)
    forward, backward = ({row["kernel"] for row in rows if row["subject"] == subject} for subject in expected[:2])
    assert "aten::topk" in forward
    assert "aten::topk" not in backward  # the forward pass prepares it, and is not profiled
    assert all(row["launches"] == "" for row in read(tmp_path / FILE))  # operators on a CPU are no launches

    kept = [row for row in read(tmp_path / FILE) if row["mode"] == "forward" and row["popularity"] == "zipf"]
    _replace(kept[:2], tmp_path)  # cut between a profile and its row: that of compiled is not there
    before = Counter((row["subject"], row["kernel"]) for row in rows)
    assert run(ops_arguments(*words, "--profile", "--resume")) == 0
    assert Counter((row["subject"], row["kernel"]) for row in read(tmp_path / PROFILES)) == before


def test_what_cannot_be_built_costs_no_reference(register, ops_arguments, monkeypatch, capsys):
    def absent(case, inputs):
        raise Unavailable("not here")

    register(absent=absent)
    monkeypatch.setattr("benchmarks.ops.bench.Expected", lambda *_: pytest.fail("computed for nobody"))
    assert run(ops_arguments("--ops", "headwise_memory")) == 0
    assert "absent: not measured, not here" in capsys.readouterr().err


def test_what_prepares_a_run_has_ended_before_it_is_profiled(monkeypatch):
    gpu = SimulatedGpu(monkeypatch)
    monkeypatch.setattr("benchmarks.ops.bench.kernels", lambda run, device: gpu.host_ms >= gpu.device_ms)
    assert _kernels_of(Task(lambda _: None, prepare=lambda: gpu.issue(0.1, 5.0)), "cuda")


@pytest.mark.parametrize("option", ["--resume", "--profile"])
@pytest.mark.parametrize("other", [["--no-append"], ["--backend", "torch"]])
def test_rows_that_are_not_kept_can_be_neither_resumed_nor_profiled(option, other, ops_arguments):
    with pytest.raises(SystemExit, match=f"{option} needs rows that are kept; leave out --no-append and --backend."):
        run(ops_arguments(option, *other))


class _OnSimulatedGpu:
    """A bench whose tensors stay on the CPU and whose kernels are issued to a simulated GPU."""

    def __init__(self, monkeypatch, tmp_path, profiled: str | None = None):
        self.gpu = SimulatedGpu(monkeypatch)
        self.case = Case("headwise_memory", SHAPES["tiny"], 70, "uniform", "float32", "cpu")
        this = dataclasses.replace(this_run("cpu"), device="NVIDIA H200")
        monkeypatch.setattr("benchmarks.recorded.kernels", lambda run, device: [])
        record = Recorded("cuda", tmp_path, FILE, IDENTITY, run=this)
        self.bench = Bench(record, ["sorted"], ["forward"], 0.0, profiled)
        self.leaves = dict.fromkeys(("query", "row_keys", "column_keys", "value_bank", "value_transform"))

    def time(self) -> None:
        on_gpu = dataclasses.replace(self.case, device="cuda")

        def call():
            self.gpu.issue(0.4, 0.1)
            return torch.zeros(1)

        verdict = type("Verdict", (), {"error": 1e-7, "error_of": "output"})()
        self.bench._time(on_gpu, "forward", {"sorted": call}, self.leaves, torch.zeros(1), {"sorted": verdict})


def test_no_launches_found_are_none_counted(monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.ops.bench.kernels", lambda run, device: [])
    _OnSimulatedGpu(monkeypatch, tmp_path).time()
    assert read(tmp_path / FILE)[0]["launches"] == ""


def test_a_row_of_a_gpu_has_all_three_times_and_its_launches(monkeypatch, tmp_path, capsys):
    found = [KernelTime("a", 5, 80.0), KernelTime("b", 2, 20.0)]
    monkeypatch.setattr("benchmarks.ops.bench.kernels", lambda run, device: found)
    _OnSimulatedGpu(monkeypatch, tmp_path, "uniform").time()
    (row,) = read(tmp_path / FILE)
    assert [row[name] for name in ("median_ms", "p20_ms", "p80_ms", "host_ms", "wall_ms", "launches")] == [
        *("0.1", "0.1", "0.1", "0.4", "0.5", "7")
    ]
    roofline = float(row["roofline_us"])
    assert float(row["roofline_fraction"]) == pytest.approx(roofline / 100, abs=1e-4)  # of the device's time
    assert "host   0.400  wall   0.500     7 launches" in capsys.readouterr().err
    assert [(row["kernel"], row["launches"]) for row in read(tmp_path / PROFILES)] == [("a", "5"), ("b", "2")]


def test_what_fits_into_memory_once_and_then_no_more_keeps_no_other_from_being_timed(
    register, ops_arguments, tmp_path
):
    timed = []

    def hungry(case, inputs):
        def call():
            timed.extend([case] if case.tokens == 70 and not torch.is_grad_enabled() else [])
            if len(timed) > 2:  # neither compiling nor the peak, but timing
                raise torch.OutOfMemoryError("CUDA out of memory")
            return _right(case, inputs)()

        return call

    register(right=_right, hungry=hungry)
    words = ["--ops", "headwise_memory", "--popularity", "uniform", "--modes", "forward"]
    assert run(ops_arguments(*words)) == 0
    statuses = {row["provider"]: (row["mode"], row["status"]) for row in read(tmp_path / FILE)}
    assert statuses == {"right": ("forward", "ok"), "hungry": ("forward", "out of memory")}


def test_a_gpu_that_is_lost_fails_one_provider_alone(monkeypatch, tmp_path):
    def broken(*_, **__):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    on_gpu = _OnSimulatedGpu(monkeypatch, tmp_path)
    case = dataclasses.replace(on_gpu.case, device="cuda")
    monkeypatch.setattr(torch, "randint", broken)
    with pytest.raises(SystemExit, match="go on with --resume"):
        on_gpu.bench._time(case, "forward", {"sorted": broken, "naive": broken}, on_gpu.leaves, None, {"sorted": None})
    assert [(row["provider"], row["status"]) for row in read(tmp_path / FILE)] == [("sorted", "failed")]


def test_times_are_kept_where_no_profile_can_be_taken(monkeypatch, tmp_path, capsys):
    def broken(run, device):
        raise RuntimeError("CUPTI is not allowed\nhere")

    monkeypatch.setattr("benchmarks.ops.bench.kernels", broken)
    on_gpu = _OnSimulatedGpu(monkeypatch, tmp_path)
    on_gpu.time()
    (row,) = read(tmp_path / FILE)
    assert (row["status"], row["median_ms"], row["launches"]) == ("ok", "0.1", "")
    assert "sorted forward: no profile, RuntimeError: CUPTI is not allowed\n" in capsys.readouterr().err
    assert not on_gpu.bench.record.troubles

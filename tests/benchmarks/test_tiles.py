"""Which tiles the benchmark times, what it makes of the times, and where it writes that down."""

import json
from types import SimpleNamespace

import pytest
import torch
from processes.warm import run_warm

from benchmarks.__main__ import main
from benchmarks.pretended_gpu import NAME
from benchmarks.report import ROOT
from benchmarks.tiles.cases import Case
from benchmarks.tiles.run import Bench, fastest, source, written
from benchmarks.tiles.trying import candidates
from benchmarks.tracked import read
from midus_hf.ops.dispatch.tiles import TILES, Tiles, measured_tiles

WRONG = ('{"num_warps": 8}', '{"num_warps": 8, "BT": 64}')
CODE = "import runpy; runpy.run_module('benchmarks', run_name='__main__', alter_sys=True)"
KERNEL = "packed_scores_kernel"


def test_tiles_are_tried_as_on_a_gpu_and_written_down(tmp_path):
    words = ["tiles", "--rehearse", "--resume", "--kernels", KERNEL, "--cases", "memory tiny", "--seconds", "0"]
    words += ["--results", tmp_path, "--write", tmp_path / "tiles.json"]
    done = run_warm(CODE, *words, folder=ROOT, TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr[-3000:]
    rows = read(tmp_path / "tiles.csv")
    assert {(row["device"], row["kernel"], row["case"], row["status"]) for row in rows} == {
        (NAME, KERNEL, "memory tiny", "ok")
    }
    shape = json.loads(rows[0]["shape"])
    assert [json.loads(row["changes"]) for row in rows] == [{}, *candidates(TILES[KERNEL], *shape)]
    assert all(float(row["median_ms"]) > 0 and float(row["error"]) < 1e-2 for row in rows)
    found = measured_tiles(tmp_path / "tiles.json").get(NAME, {})
    changes = fastest(rows)[KERNEL, tuple(shape)]
    assert found == ({KERNEL: {tuple(shape): changes}} if changes else {})
    again = run_warm(CODE, *words, folder=ROOT, TRITON_INTERPRET="0")
    assert again.returncode == 0 and read(tmp_path / "tiles.csv") == rows


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Of a kernel that takes an addend, and gives a sum that depends on it where its tile is wrong."""

    def build(device):
        def call():
            tile = tiles(torch.device(device), 1)
            if tile["num_warps"] == 2:
                raise RuntimeError("out of resource: shared memory\nof this GPU")
            return torch.ones(4) * (2 if tile["num_warps"] == 8 else 1)

        return {"some_kernel": call}

    tiles = Tiles(
        "some_kernel", lambda changes, _: {"num_warps": 4, "BT": 32} | changes, {"num_warps": (1, 8), "BT": (16, 64)}
    )
    monkeypatch.setitem(TILES, "some_kernel", tiles)
    options = {"resume": True, "budget": None, "no_append": False, "kernels": None, "seconds": 0, "results": tmp_path}
    return Bench(SimpleNamespace(**options), "cpu"), Case("some case", build)


def test_what_computes_something_else_or_does_not_fit_is_not_timed(bench, capsys):
    bench, case = bench
    bench.measure(case)
    statuses = {row["changes"]: row["status"] for row in bench.record.rows()}
    expected = dict.fromkeys(['{"num_warps": 2}', '{"num_warps": 2, "BT": 16}'], "too large")
    expected |= dict.fromkeys(WRONG, "refused")
    assert statuses == expected | dict.fromkeys(["{}", '{"BT": 16}', '{"BT": 64}'], "ok")
    assert all((row["median_ms"] != "") == (row["status"] == "ok") for row in bench.record.rows())
    assert (
        bench.record.troubles[0]
        == 'some_kernel, some case, {"num_warps": 8}: differs from the rule\'s by 1.0e+00 (RMS ratio)'
    )
    told = capsys.readouterr().err
    assert 'some_kernel, some case, {"num_warps": 2}: RuntimeError: out of resource: shared memory\n' in told


def test_what_was_refused_is_still_a_trouble_when_a_run_goes_on(bench):
    first, case = bench
    first.measure(case)
    again = Bench(first.arguments, "cpu")
    assert again.record.troubles == [f"some_kernel some case {changes}: refused before" for changes in WRONG]
    again.measure(case)
    assert again.record.rows() == first.record.rows()


def test_a_kernel_whose_own_tile_fails_keeps_no_other_from_being_timed(bench, tmp_path):
    bench, case = bench

    def failing(device):
        def call():
            raise torch.OutOfMemoryError("no room\nfor it")

        return {"another_kernel": call, **case.build(device)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TILES, "another_kernel", TILES["some_kernel"])
        bench.measure(Case("no case", lambda device: 1 / 0))
        bench.measure(Case("some case", failing))
    assert bench.record.troubles[:2] == [
        "no case: ZeroDivisionError: division by zero",
        "another_kernel, some case: OutOfMemoryError: no room",
    ]
    assert {row["kernel"]: row["status"] for row in bench.record.rows() if row["changes"] == "{}"} == {
        "another_kernel": "failed",
        "some_kernel": "ok",
    }
    assert Bench(bench.arguments, "cpu").record.troubles[0] == "another_kernel some case {}: failed before"
    assert list(fastest(bench.record.rows())) == [("some_kernel", (1,))]


def row(changes, p20, median, p80, shape=(1, False), status="ok"):
    times = {"p20_ms": str(p20), "median_ms": str(median), "p80_ms": str(p80)}
    return {"kernel": KERNEL, "shape": json.dumps(shape), "changes": json.dumps(changes), "status": status, **times}


def test_a_tile_is_faster_where_its_slow_runs_are_faster_than_the_rules_fast_ones():
    usual, other = row({}, 1.0, 1.1, 1.2), row({}, 1.0, 1.1, 1.2, (2, True))
    assert fastest([usual, row({"BT": 32}, 0.8, 0.9, 1.0), row({"BT": 64}, 0.7, 0.95, 0.96)]) == {
        (KERNEL, (1, False)): {}
    }
    assert fastest([usual, row({"BT": 32}, 0.8, 0.9, 0.99), row({"BT": 16}, 0.8, 0.91, 0.92), other]) == {
        (KERNEL, (1, False)): {"BT": 32},
        (KERNEL, (2, True)): {},
    }
    assert fastest([usual, {**row({"BT": 32}, 0, 0, 0), "status": "refused"}]) == {(KERNEL, (1, False)): {}}
    assert fastest([row({"BT": 32}, 0.8, 0.9, 0.99)]) == {(KERNEL, (1, False)): {}}


def test_a_table_keeps_what_was_not_timed(tmp_path, monkeypatch):
    known = {"H200": {"a": {(1, True): {"BT": 2}}}, "H100": {"a": {(2, True): {"BT": 4}, (4, True): {"BT": 8}}}}
    monkeypatch.setattr("benchmarks.tiles.run.MEASURED", known)
    timed = {("b", (64, False)): {"BT": 16, "num_warps": 2}, ("a", (2, True)): {}, ("c", (1,)): {}}
    written(tmp_path / "tiles.json", "H100", timed)
    found = measured_tiles(tmp_path / "tiles.json")
    assert found == {
        "H100": {"a": {(4, True): {"BT": 8}}, "b": {(64, False): {"BT": 16, "num_warps": 2}}},
        "H200": {"a": {(1, True): {"BT": 2}}},
    }
    assert (tmp_path / "tiles.json").read_text() == source(found)
    monkeypatch.setattr("benchmarks.tiles.run.MEASURED", {})  # what the file has is known too
    written(tmp_path / "tiles.json", "H200", {("a", (1, True)): {}})
    assert list(measured_tiles(tmp_path / "tiles.json")) == ["H100"]


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ["--rehearse", "--write"],
            "--rehearse measures nothing that kernels could go by; name another file with --write.",
        ),
        (["--no-append", "--write"], "--write reads the rows that --no-append leaves out; drop one of them."),
        (["--device", "cpu", "--cases", "gpt-2"], "case is 'gpt-2'; expected some of memory llama-3.2-1b, decoding"),
        (["--device", "cpu", "--kernels", "gemm"], "kernel is 'gemm'; expected some of "),
    ],
    ids=["rehearsal", "rows", "case", "kernel"],
)
def test_what_makes_no_sense_is_refused(words, message, tmp_path):
    with pytest.raises(SystemExit) as refusal:
        main(["tiles", "--results", str(tmp_path), *words])
    assert message in str(refusal.value)


def test_a_budget_ends_between_kernels_and_leaves_the_table_that_kernels_read(tmp_path, monkeypatch, capsys):
    table = tmp_path / "tiles.json"
    monkeypatch.setattr("benchmarks.__main__.TILES", table)
    words = ["tiles", "--device", "cpu", "--results", str(tmp_path), "--budget", "-1"]
    assert main([*words, "--write", str(table)]) == 0
    told = capsys.readouterr().err
    assert "out of time; not measured: memory llama-3.2-1b, decoding llama-3.2-1b, " in told
    assert "tiles.json is left as it is until all cases are timed" in told and not table.exists()
    assert main([*words, "--write", str(tmp_path / "other.json")]) == 0
    assert (tmp_path / "other.json").exists()


def test_wrong_tiles_end_with_status_1(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Bench, "measure", lambda self, case: self.record.troubles.append(case.name))
    assert main(["tiles", "--device", "cpu", "--results", str(tmp_path), "--cases", "depth 64 moda-700m"]) == 1
    assert "FAILED depth 64 moda-700m\n" in capsys.readouterr().err

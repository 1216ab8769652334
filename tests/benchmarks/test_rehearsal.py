"""What a lent GPU would be asked runs on a pretended one, and its rows are like those of a real one."""

import pytest
from pairs import by_default
from processes.warm import run_warm

from benchmarks.depth_cost.shapes import WHATS
from benchmarks.gpu.attention_kernels import CASES
from benchmarks.gpu.attention_kernels import main as attention_kernels
from benchmarks.gpu.run import write_summary
from benchmarks.pretended_gpu import NAME
from benchmarks.report import ROOT
from benchmarks.tracked import RESULTS, read
from midus_hf.ops.depth.sequence_kernels import kernel_of


def rehearsed(out, *words):
    module, *words = words if words[0].startswith("benchmarks.") else ("benchmarks", *words)
    code = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    words = [*words, "--rehearse", "--resume", "--profile", "--results", out]
    return run_warm(code, *words, folder=ROOT, TRITON_INTERPRET="0")


SOME, OTHERS = "sorted,one-block,expand-compiled", "exact,kept-values"


@pytest.mark.parametrize("providers", by_default([SOME], [SOME, OTHERS]))
def test_ops_run_their_kernels_and_are_timed_as_on_a_gpu(providers, tmp_path):
    words = ["ops", "--ops", "headwise_memory", "--providers", providers, "--seconds", "0"]
    done = rehearsed(tmp_path, *words)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = read(tmp_path / "ops.csv")
    assert {row["provider"] for row in rows} == set(providers.split(","))
    assert {(row["device"], row["backend"], row["status"], row["dtype"]) for row in rows} == {
        (NAME, "cuda", "ok", "bfloat16")
    }
    for row in rows:
        assert all(float(row[name]) > 0 for name in ("median_ms", "host_ms", "wall_ms", "launches"))
        assert row["roofline_us"]
    assert any("midus" in row["kernel"] for row in read(tmp_path / "profile.csv"))
    again = rehearsed(tmp_path, *words)
    assert again.returncode == 0 and read(tmp_path / "ops.csv") == rows


def test_the_depth_is_read_and_timed_as_on_a_gpu(tmp_path):
    words = ["benchmarks.depth_cost", "--shapes", "2x8x2", "--seconds", "0"]
    done = rehearsed(tmp_path, *words)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = read(tmp_path / "depth_cost.csv")
    assert [row["what"] for row in rows] == list(WHATS["cuda"])
    assert {(row["device"], row["status"], row["dtype"]) for row in rows} == {(NAME, "ok", "bfloat16")}
    assert all(float(row[name]) > 0 for row in rows for name in ("median_ms", "host_ms", "wall_ms"))
    profiled = {row["subject"] for row in read(tmp_path / "profile.csv") if "midus" in row["kernel"]}
    assert profiled == {"depth 2x8x2, merged", "depth 2x8x2, merged-flash"}
    assert rehearsed(tmp_path, *words).returncode == 0 and read(tmp_path / "depth_cost.csv") == rows


@pytest.fixture
def interpreter(monkeypatch):
    """The variable that a rehearsal sets is as it was afterwards."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def test_each_case_of_attention_says_which_kernel_it_takes(tmp_path, capsys, interpreter):
    assert attention_kernels(["--rehearse", "--results", str(tmp_path)]) == 0
    rows = read(tmp_path / "attention_kernels.csv")
    assert [row["case"] for row in rows] == [case.name for case in CASES]
    # A pretended GPU computes on the CPU, and takes the kernel that torch has there.
    assert {(row["device"], row["expected"], row["taken"], row["status"]) for row in rows} == {
        (NAME, "FLASH_ATTENTION", "FLASH_ATTENTION", "ok")
    }
    assert "compiled, masked: FLASH_ATTENTION, ok" in capsys.readouterr().err
    write_summary(tmp_path, [], rehearsed=True)
    assert "| masked | FLASH_ATTENTION | FLASH_ATTENTION | ok |" in (tmp_path / "summary.md").read_text()


def with_another_number(output):
    changed = output.clone()
    changed[0, 0, 0, 0] *= 1.01
    return changed


OTHER_BITS = "other bits than torch's with a gradient"


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda kernel: None, "RuntimeError: no kernel returns the divisor of its softmax"),
        (lambda kernel: kernel._replace(name="MATH"), "another kernel"),
        (lambda kernel: spoiled(kernel, lambda output, lse: (output, lse + 0.01)), "wrong divisor"),
        (lambda kernel: spoiled(kernel, lambda output, lse: (output * 1.1, lse)), "wrong numbers"),
        (lambda kernel: spoiled(kernel, lambda output, lse: (with_another_number(output), lse)), OTHER_BITS),
    ],
    ids=["none", "another", "divisor", "numbers", "bits"],
)
def test_a_case_of_attention_that_does_not_hold_fails_the_step(spoil, told, tmp_path, monkeypatch, interpreter):
    monkeypatch.setattr("benchmarks.gpu.attention_kernels.kernel_of", lambda call: spoil(kernel_of(call)))
    assert attention_kernels(["--rehearse", "--results", str(tmp_path)]) == 1
    for row in read(tmp_path / "attention_kernels.csv"):
        # A graph may have another kernel than torch takes outside of it, and other bits.
        is_free = told == OTHER_BITS and row["case"].startswith("compiled")
        assert row["status"] == ("ok" if is_free else told)


def spoiled(kernel, change):
    def forward(call):
        output, lse, extra = kernel.forward(call)
        return *change(output, lse), extra

    return kernel._replace(forward=forward)


@pytest.mark.parametrize("method", by_default(["midus-hml"], ["midus-hml", "llama-pro"]))
def test_models_are_trained_read_and_generate_through_captured_steps(method, tmp_path):
    words = ["model", "--base", "llama-3.2-1b", "--methods", method, "--placements", "top-heavy"]
    done = rehearsed(tmp_path, *words, "--generate-batches", "2")
    assert done.returncode == 0, done.stderr[-3000:]
    rows = read(tmp_path / "model.csv")
    phases = (("train", ""), ("prefill", ""), ("generate", "eager"), ("generate", "graph"))
    assert {(row["method"], row["phase"], row["decoding"]) for row in rows} == {(method, *phase) for phase in phases}
    assert {(row["device"], row["status"], row["base"]) for row in rows} == {(NAME, "ok", "llama-3.2-1b")}
    assert all(float(row["host_s"]) > 0 for row in rows)


@pytest.mark.parametrize("command", ["ops", "model", "benchmarks.depth_cost"])
def test_rows_of_a_rehearsal_are_not_put_beside_measured_ones(command):
    done = rehearsed(RESULTS, command)
    assert done.returncode == 1
    assert "--rehearse needs a folder of its own for rows that mean nothing; name one with --results." in done.stderr

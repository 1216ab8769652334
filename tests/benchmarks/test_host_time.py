"""What the host spends on blocks is counted and timed for every body."""

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from benchmarks.host_time import _Counting, body_of, main, measured, model_of, tasks_of
from benchmarks.tracked import this_run
from midus_hf.models import FAMILIES

ROOT = Path(__file__).parents[2]


def test_a_memory_block_launches_less_than_a_decoder_block():
    row = measured(this_run("cpu"), "llama", "torch", rounds=1)
    assert 0 < row.memory_launches
    row = measured(this_run("cpu"), "llama", "native", rounds=1)
    assert row.memory_launches < row.decoder_launches
    times = {name: value for name, value in asdict(row).items() if name.endswith("_us")}
    assert len(times) == 8 and all(value > 0 for value in times.values())
    assert row.ratio > 0 and (row.family, row.body, row.rounds) == ("llama", "native", 1)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_has_both_blocks(family):
    model = model_of(family)
    with torch.no_grad():
        given = {name: task() for name, task in tasks_of(model).items()}
    assert given["decoder"].shape == given["memory"].shape == given["memory_op"].shape == (1, 1, 64)


def test_kernels_are_prepared_and_not_run():
    """In a fresh interpreter, since this one's kernels may be interpreted."""
    pytest.importorskip("triton")
    code = """
import torch
from benchmarks.idle_launches import idle_launches
from midus_hf.ops import headwise_memory
from midus_hf.ops.headwise.triton.exact import forward_kernel

arguments = torch.ones(1, 1, 4), torch.ones(1, 2, 2), torch.ones(1, 2, 2), torch.ones(4, 3)
with torch.no_grad(), idle_launches():
    assert headwise_memory(*arguments, None, 1).shape == (1, 1, 3)
(kernel,) = forward_kernel.device_caches[0][0].values()
assert kernel.metadata.num_warps == 2 and kernel.metadata.target.arch == 90
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]


def test_interpreted_kernels_are_refused(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit, match="TRITON_INTERPRET is 1, so kernels are interpreted; unset it, or choose"):
        with body_of("triton"):
            pass


def test_a_table_is_printed_and_nothing_kept_if_so_asked(monkeypatch, capsys, tmp_path):
    kept = tmp_path / "host_time.csv"
    monkeypatch.setattr("benchmarks.host_time.HOST_TIME_RESULTS", kept)
    words = ["host_time", "--bodies", "torch", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", [*words, "--no-append"])
    main()
    header, rule, row = capsys.readouterr().out.splitlines()
    assert header.count("|") == rule.count("|") == row.count("|") and row.startswith("| torch |") and not kept.exists()
    monkeypatch.setattr(sys, "argv", words)
    main()
    assert len(kept.read_text().splitlines()) == 2


def test_what_computes_is_counted_in_place_or_not_and_views_are_not():
    numbers = torch.ones(2, 3)
    with _Counting() as counting:
        numbers.T, numbers.view(6), torch.empty(2), numbers[0]
    assert counting.launches == 0
    with _Counting() as counting:
        numbers.add_(1), torch.mul(numbers, 2, out=torch.empty(2, 3)), numbers + 1, numbers.T.relu_()
    assert counting.launches == 4


@pytest.mark.parametrize(
    "words, message",
    [
        (["--bodies", "torch,cuda"], "body is 'cuda'; expected one of native, torch, triton, joined by commas."),
        (["--bodies", ""], "body is ''; expected one of"),
        (["--rounds", "0"], "rounds is 0; expected 1 or more."),
    ],
    ids=["body", "no-body", "rounds"],
)
def test_what_cannot_be_measured_is_refused_in_a_line(words, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["host_time", "--no-append", *words])
    with pytest.raises(SystemExit) as refused:
        main()
    told = capsys.readouterr()
    assert refused.value.code == 2 and message in told.err and not told.out

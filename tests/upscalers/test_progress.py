"""Every stage of the work tells of steps, and none stands at its end while work goes on."""

import json
import os
import pty
import re
import subprocess
import sys

import pytest
import torch

from tests.upscalers.checkpoints import SMALL, logits, save_base
from tests.upscalers.solvers.recording import Recorder
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale


def check(progress):
    assert progress.shown == ["start", "finish"] and progress.balanced
    assert "writing 1 shard" in progress.names[:-1], "the bar of bytes ends before the work does"


@pytest.mark.parametrize("method", ["midus-hml", "avg-deus"])
@pytest.mark.parametrize("verify", [True, False])
def test_every_stage_tells_of_all_its_steps(shared_base, tmp_path, method, verify):
    progress = Recorder()
    options = SMALL.get(method, {})
    report = upscale(
        base=shared_base(), method=method, output=tmp_path / "out", options=options, verify=verify, progress=progress
    )
    check(progress)
    expected = ["checking config and tokenizer", "waiting for the disk", "recording what was done"]
    if report.identity.checked == "logits":
        expected.insert(1, "comparing with the base")
        assert progress.told_of("comparing with the base") == [1] * (4 + report.num_layers + 2)
    assert progress.names[progress.names.index("writing 1 shard") + 1 :] == expected
    assert sum(progress.told_of("waiting for the disk")) > report.bytes.written


def test_every_stage_of_taking_out_tells_of_all_its_steps(shared_base, tmp_path):
    upscale(base=shared_base(), method="llama-pro", output=tmp_path / "pro", verify=False)
    progress = Recorder()
    strip(tmp_path / "pro", tmp_path / "stripped", progress=progress)
    check(progress)
    assert progress.names == ["writing 1 shard", "waiting for the disk", "checking what was written"]


def test_a_failure_ends_the_display(shared_base, tmp_path, monkeypatch):
    monkeypatch.setattr("upscalers.runs.writing._validated", lambda folder: 1 / 0)
    progress = Recorder()
    with pytest.raises(ZeroDivisionError):
        upscale(base=shared_base(), method="solar", output=tmp_path / "out", progress=progress)
    assert progress.shown == ["start", "finish"]


def test_a_fresh_process_shows_the_stages_on_a_terminal_and_prints_one_object_on_standard_output(tmp_path):
    code = "import sys; from midus_hf.cli.upscale import main; sys.exit(main())"
    base = save_base(tmp_path / "base", dtype=torch.bfloat16)
    arguments = "--base base --method midus-hml --output out --set n=8 --set k=2 --json".split()
    reader, writer = pty.openpty()
    environment = {**os.environ, "COLUMNS": "120", "TERM": "xterm", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=writer,
        env=environment,
    )
    os.close(writer)
    shown = b""
    try:
        while chunk := os.read(reader, 4096):
            shown += chunk
    except OSError:  # the other end is closed
        pass
    os.close(reader)
    printed, _ = process.communicate()
    assert process.returncode == 0, shown.decode()
    assert json.loads(printed)["identity"].items() >= {"checked": "logits", "max_abs_diff": 0.0}.items()
    assert torch.equal(logits(base), logits(tmp_path / "out"))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    order = [text.index(name) for name in ("loading libraries", "writing 1 shard", "comparing with the base")]
    assert order == sorted(order)
    assert re.search(r"comparing with the base .* \d+ of 12 layers and heads", text)

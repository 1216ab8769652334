"""Every stage of the work tells of steps, and none stands at its end while work goes on."""

import contextlib
import json
import os
import pty
import re
import threading

import pytest
import torch
from processes.warm import run_warm

from tests.upscalers.checkpoints import SMALL, logits, save_base
from tests.upscalers.solvers.recording import Recorder
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale


def check(progress):
    assert progress.shown == ["start", "finish"] and progress.balanced
    assert "writing 1 shard" in progress.names[:-1], "the bar of bytes ends before the work does"


@pytest.mark.parametrize("method", ["midus-hml", "avg-deus"])
@pytest.mark.parametrize("verify", [True, False])
def test_every_stage_tells_of_all_its_steps_until_the_work_is_done_or_fails(
    shared_base, tmp_path, monkeypatch, method, verify
):
    progress, options = Recorder(), SMALL.get(method, {})
    request = {"base": shared_base(), "method": method, "options": options, "verify": verify}
    report = upscale(output=tmp_path / "out", progress=progress, **request)
    check(progress)
    expected = ["checking config and tokenizer", "recording what was done"]
    if report.identity.checked == "logits":
        expected.insert(1, "comparing with the base")
        assert progress.told_of("comparing with the base") == [1] * (4 + report.num_layers + 2)
    assert progress.names[progress.names.index("writing 1 shard") + 1 :] == expected
    progress = Recorder()
    strip(tmp_path / "out", tmp_path / "stripped", progress=progress)
    check(progress)
    assert progress.names == ["writing 1 shard", "checking what was written"]
    monkeypatch.setattr("upscalers.runs.writing._validated", lambda folder: 1 / 0)
    progress = Recorder()
    with pytest.raises(ZeroDivisionError):
        upscale(output=tmp_path / "fails", progress=progress, **request)
    assert progress.shown == ["start", "finish"]


ON_A_TERMINAL = """
import os, sys
os.dup2(os.open(sys.argv.pop(1), os.O_WRONLY | os.O_NOCTTY), 2)
from midus_hf.cli.upscale import main
sys.exit(main())
"""


def test_a_process_shows_the_stages_on_a_terminal_and_prints_one_object_on_standard_output(tmp_path):
    base = save_base(tmp_path / "base", dtype=torch.bfloat16)
    arguments = "--base base --method midus-hml --output out --set n=8 --set k=2 --json".split()
    reader, writer = pty.openpty()
    shown: list[bytes] = []

    def read() -> None:  # meanwhile, or the terminal would be full
        with contextlib.suppress(OSError):  # the other end is closed
            while chunk := os.read(reader, 4096):
                shown.append(chunk)

    terminal = threading.Thread(target=read)
    terminal.start()
    done = run_warm(ON_A_TERMINAL, os.ttyname(writer), *arguments, folder=tmp_path, COLUMNS="120", TERM="xterm")
    os.close(writer)
    terminal.join()
    os.close(reader)
    assert done.returncode == 0, shown
    assert json.loads(done.stdout)["identity"].items() >= {"checked": "logits", "max_abs_diff": 0.0}.items()
    assert torch.equal(logits(base), logits(tmp_path / "out"))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(shown).decode())
    order = [text.index(name) for name in ("writing 1 shard", "comparing with the base")]
    assert order == sorted(order)
    assert re.search(r"comparing with the base .* \d+ of 12 layers and heads", text)

"""The demo on a tiny model and few texts, its report, and its phases, which keep what has ended and touch no files of a person."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from pairs import by_default
from safetensors.torch import load_file

import demo.__main__ as demo
from demo import phases as module
from demo.phases import Phases, TrainingProgress, schedule
from demo.report import write_report
from material.smollm2 import tiny_llama
from midus_hf.training.checkpoints import finish_checkpoint


@pytest.mark.material
@pytest.mark.product
def test_demo_gives_the_base_back(tmp_path, monkeypatch, capsys):
    configs = tmp_path / "configs"
    for name, keys in {
        "upscale": "method: midus-hml\nnum_new_layers: 3\noptions: {n: 8, k: 2}\n",
        "train": "sequence_length: 32\nper_device_train_batch_size: 2\nmax_steps: 2\nbf16: false\nlogging_steps: 1\n",
    }.items():
        (configs / name).mkdir(parents=True)
        (configs / name / "demo.yaml").write_text(keys)
    output = tmp_path / "demo"
    monkeypatch.setattr(demo, "CONFIGS", configs)
    monkeypatch.setattr(demo, "smollm2_135m", tiny_llama)
    monkeypatch.setattr(sys, "argv", ["demo", "--output", str(output)])
    demo.main()
    shown = capsys.readouterr().out
    assert all(f"[{number}/7] " in shown for number in range(1, 8))
    assert "{" not in shown.replace("--eval_text={", "")
    report = json.loads((output / "report.json").read_text())
    assert list(report["seconds"]) == ["upscale", "before", "training", "after", "samples", "strip"]
    assert report["weights"]["base"] == report["weights"]["strip's"]
    base, again = (load_file(folder / "model.safetensors") for folder in (tiny_llama(), output / "base-again"))
    assert base.keys() == again.keys()
    assert all(torch.equal(base[name], again[name]) for name in base)
    assert (output / "report.html").exists()
    assert json.loads((output / "phases.json").read_text())["finished"]


WEIGHTS = {"tensors": 272, "bytes": 538_060_032, "sha256": "0123456789abcdef" * 4}


@pytest.fixture
def arguments(tmp_path):
    log = tmp_path / "trainer_state.json"
    seen = [{"step": step, "num_input_tokens_seen": 1024 * step} for step in range(15)]
    events = [{**one, "loss": 4.0 - 0.1 * one["step"]} for one in seen[1:]]
    events += [{**one, "eval_a_loss": 3.5 - 0.1 * one["step"], "eval_b_loss": 3.0} for one in (seen[0], seen[14])]
    events.append({**seen[14], "train_loss": 3.3, "train_runtime": 7.0})  # of the last call only
    log.write_text(json.dumps({"log_history": events}))
    measures = {"base": (33.8613, 134_515_008), "upscaled": (33.8613, 143_409_088), "trained": (28.5646, 143_409_088)}
    return {
        "models": {
            name: {"perplexity": {"perplexity": perplexity, "tokens": 100}, "parameters": parameters}
            for name, (perplexity, parameters) in measures.items()
        },
        "samples": {name: {"text": f"{name} <text>", "tokens_per_second": 6.4} for name in measures},
        "prompt": "Fellow-citizens",
        "log": log,
        "texts": {"a": "what is learned", "b": "what is kept"},
        "upscale_record": {"new_layers": [1, 4], "parameters": {"trainable": 8_894_080, "total": 143_409_088}},
        "weights": {"base": dict(WEIGHTS), "strip's": dict(WEIGHTS)},
        "commands": ["upscale --base a --output b"],
        "seconds": {"upscale": 60.0, "training": 300.0, "strip": 120.0},
        "machine": "two cores",
    }


def test_report_shows_every_measure(tmp_path, arguments):
    table = write_report(tmp_path, **arguments)
    assert "| base | 33.8613 | 134.5 M | 6.4 |" in table
    assert "| trained | 28.5646 | 143.4 M | 6.4 |" in table
    assert "| what is learned | 3.5000 | 2.1000 | -1.4000 |\n| what is kept | 3.0000 | 3.0000 | +0.0000 |" in table
    assert all(f"| {model} | 272 | 538,060,032 | 0123456789abcdef |" in table for model in ("base", "strip's"))
    assert "| upscale | 1.0 |\n| training | 5.0 |\n| strip | 2.0 |\n| all | 8.0 |" in table
    page = (tmp_path / "report.html").read_text()
    assert "upscaled &lt;text&gt;" in page
    assert "upscale --base a" in page
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    kept = json.loads((tmp_path / "report.json").read_text())
    assert (kept["seconds"], kept["weights"]) == (arguments["seconds"], arguments["weights"])


def test_report_refuses_other_weights_and_measures(tmp_path, arguments):
    arguments["weights"]["strip's"]["sha256"] = "f" * 64
    with pytest.raises(ValueError, match=r"strip gave back .*'ffff.*; expected the base's .*0123456789abcdef"):
        write_report(tmp_path, **arguments)
    arguments["weights"]["strip's"] = WEIGHTS
    arguments["models"]["upscaled"]["perplexity"]["perplexity"] = 0.123
    with pytest.raises(ValueError, match="perplexity differs from the base's; expected equality"):
        write_report(tmp_path, **arguments)


PRINTS = [sys.executable, "-c", "print('a table')"]
FAILS = [sys.executable, "-c", "raise SystemExit(3)"]


def test_output_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    for folder in (tmp_path, tmp_path / "thesis.txt"):
        with pytest.raises(SystemExit, match="which holds files; expected a new or an empty folder, or that of a run"):
            Phases(folder, tmp_path / "default", 1, {})
    assert (tmp_path / "thesis.txt").read_text() == "mine"
    Phases(tmp_path / "new", tmp_path / "default", 1, {})
    assert (tmp_path / "new").is_dir()


def test_resumed_run_skips_finished_phases(tmp_path, capsys):
    first = Phases(tmp_path, tmp_path, 2, {"steps": 1})
    first.run("a", "doing a", 30, *PRINTS)
    with pytest.raises(SystemExit, match="failed with exit status 3; the same command begins again with it"):
        first.run("b", "doing b", 100, *FAILS)
    shown = capsys.readouterr().out
    assert "[1/2] doing a, about 30 s\n$ " in shown
    assert "\na table\n" in shown
    spent = first.seconds
    assert all(seconds > 0 for seconds in spent.values())

    second = Phases(tmp_path, tmp_path, 2, {"steps": 1})
    second.run("a", "doing a", 30, *FAILS)  # not run again
    second.run("b", "doing b", 100, *PRINTS)
    assert "[1/2] doing a: done, in " in capsys.readouterr().out
    assert second.seconds["a"] == spent["a"]
    assert second.seconds["b"] > spent["b"]
    assert second.commands == first.commands


@pytest.mark.parametrize("settings", [{"steps": 2}, {"steps": 1}])
def test_finished_or_changed_run_begins_anew(tmp_path, settings):
    earlier = Phases(tmp_path, tmp_path, 1, {"steps": 1})
    earlier.run("a", "doing a", 1, *PRINTS)
    if settings == {"steps": 1}:
        earlier.finish()
    (tmp_path / "model").mkdir()
    again = Phases(tmp_path, tmp_path, 1, settings)
    assert not again.seconds
    assert not (tmp_path / "model").exists()


def test_run_output_file_is_written_atomically(tmp_path, capsys):
    phases = Phases(tmp_path, tmp_path, 3, {})
    for name in ("made", "trained"):
        (tmp_path / name).mkdir()
    phases.run("a", "doing a", 1, *PRINTS, output=tmp_path / "a.json", makes=tmp_path / "made")
    assert (tmp_path / "a.json").read_text() == "a table\n"
    assert "\na table" not in capsys.readouterr().out
    phases.run("b", "doing b", 1, *PRINTS, makes=tmp_path / "trained", steps=3)
    assert not (tmp_path / "made").exists()
    assert (tmp_path / "trained").exists(), "training goes on from there"
    with pytest.raises(SystemExit):
        phases.run("c", "doing c", 1, *FAILS, output=tmp_path / "c.json")
    assert not (tmp_path / "c.json").exists()


def test_schedule_of_a_resumed_run_skips_the_start(tmp_path):
    ends = ["--save_total_limit=1", "--resume_from_checkpoint=auto"]
    measures = ["--eval_steps=10", "--eval_on_start=true", "--disable_tqdm=true"]
    first = ["--max_steps=50", "--save_steps=10", *ends, *measures]
    assert schedule(50, 5, tmp_path) == first
    (tmp_path / "checkpoint-10").mkdir()
    assert schedule(50, 5, tmp_path) == first  # the checkpoint is not whole, so that nothing goes on from it
    (tmp_path / "checkpoint-10" / "trainer_state.json").write_text("{}")
    finish_checkpoint(tmp_path / "checkpoint-10")
    assert "--eval_on_start=false" in schedule(50, 5, tmp_path)
    assert schedule(7, None, tmp_path) == ["--max_steps=7", "--save_steps=2", *ends, "--disable_tqdm=true"]


def test_training_progress_counts_steps_and_estimates_the_rest(monkeypatch):
    """From the checkpoint that a run continues from, and from the last five steps; evaluations before them do not count."""
    progress, clock = TrainingProgress(50, measures_first=True), time.monotonic

    def after(seconds, *lines):
        monkeypatch.setattr(time, "monotonic", lambda: clock() + seconds)
        return [progress.take(line) for line in lines], str(progress)

    resumed, reading = after(0, "resuming from outputs/trained/checkpoint-20\n")
    assert resumed == [True]
    assert reading.endswith(": step 20 of 50, measuring held-out texts, then in step 21")
    after(1000, "{'eval_loss': '3.4'}\n")
    losses = ("{'loss': '3.5', 'epoch': '0.1'}\n", "{'loss': '3.25', 'epoch': '0.1'}\n", "{'eval_loss': '3.1'}\n")
    shown, steps = after(1100, *losses)
    assert shown == [False] * 3
    assert steps.endswith(": step 22 of 50, loss 3.250, about 23 min left")  # 28 of 50 s
    assert after(1190)[1].endswith(", about 22 min left")
    assert after(1400)[1].endswith(", loss 3.250, the next has taken 5 min, and those before 50 s each")
    for step in range(7):
        after(1400 + 10 * step, losses[0])
    assert str(progress).endswith(": step 29 of 50, loss 3.500, about 3.5 min left")
    assert ": step 50 of 50, loss 3.500, measuring held-out texts and saving" in after(1500, *losses[:1] * 21)[1]


PROGRAM = """
import sys
from pathlib import Path
from demo.phases import Phases, run_demo

STOPS = '''
import signal, sys
def stop(number, frame):
    print("saved a checkpoint", flush=True)
    sys.exit(128 + number)
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
signal.pause()
'''
folder = Path(sys.argv[1])
run_demo(lambda: Phases(folder, folder, 1, {}).run("a", "doing a", 1, sys.executable, "-c", STOPS))
"""


@pytest.mark.parametrize(
    "number",
    by_default([signal.SIGTERM], [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]),
    ids=lambda number: number.name,
)
def test_signal_ends_the_command_and_keeps_its_time(number, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # under nohup, this suite ignores SIGHUP
    )
    while process.stdout.readline() != "ready\n":
        assert process.poll() is None
    os.kill(process.pid, number)
    out, err = process.communicate(timeout=60)
    assert out == "saved a checkpoint\n"
    assert process.returncode == 128 + number
    assert err == "\ndemo: interrupted while doing a; the same command continues from here.\n"
    (phase,) = json.loads((tmp_path / module.RECORD).read_text())["phases"].values()
    assert phase["seconds"] > 0
    assert not phase["ended"]

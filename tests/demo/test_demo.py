"""The demo on a tiny model and few texts, its report, and its phases, which keep what has ended and touch no files of a person."""

import copy
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
from demo.phases import Phases, TrainingProgress, duration, schedule
from demo.report import write_report
from material.smollm2 import tiny_llama
from midus_hf.training.checkpoints import finish_checkpoint


@pytest.mark.material
@pytest.mark.product
def test_the_demo_runs_to_its_end_and_gives_the_base_back(tmp_path, monkeypatch, capsys):
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
    assert all(f"[{number}/7] " in shown for number in range(1, 8)) and "{" not in shown.replace("--eval_text={", "")
    report = json.loads((output / "report.json").read_text())
    assert list(report["seconds"]) == ["upscale", "before", "training", "after", "samples", "strip"]
    assert report["weights"]["base"] == report["weights"]["strip's"]
    base, again = (load_file(folder / "model.safetensors") for folder in (tiny_llama(), output / "base-again"))
    assert base.keys() == again.keys() and all(torch.equal(base[name], again[name]) for name in base)
    assert (output / "report.html").exists() and json.loads((output / "phases.json").read_text())["finished"]


MODELS = ("base", "upscaled", "trained")
MEASURED = {"perplexity": {"perplexity": 33.8613, "tokens": 100}, "parameters": 134_515_008}
WEIGHTS = {"tensors": 272, "bytes": 538_060_032, "sha256": "0123456789abcdef" * 4}


@pytest.fixture
def arguments(tmp_path):
    log = tmp_path / "trainer_state.json"
    seen = [{"step": step, "num_input_tokens_seen": 1024 * step} for step in range(15)]
    events = [{**one, "loss": 4.0 - 0.1 * one["step"]} for one in seen[1:]]
    events += [{**one, "eval_a_loss": 3.5 - 0.1 * one["step"], "eval_b_loss": 3.0} for one in (seen[0], seen[14])]
    events.append({**seen[14], "train_loss": 3.3, "train_runtime": 7.0})  # of the last call alone
    log.write_text(json.dumps({"log_history": events}))
    upscaled = copy.deepcopy(MEASURED) | {"parameters": 143_409_088}
    trained = copy.deepcopy(upscaled)
    trained["perplexity"]["perplexity"] = 28.5646
    return {
        "models": {"base": copy.deepcopy(MEASURED), "upscaled": upscaled, "trained": trained},
        "samples": {name: {"text": f"{name} <text>", "tokens_per_second": 6.4} for name in MODELS},
        "prompt": "Fellow-citizens",
        "log": log,
        "texts": {"a": "what is learned", "b": "what is kept"},
        "upscale_record": {"new_layers": [1, 4], "parameters": {"trainable": 8_894_080, "total": 143_409_088}},
        "weights": {"base": dict(WEIGHTS), "strip's": dict(WEIGHTS)},
        "commands": ["upscale --base a --output b"],
        "seconds": {"upscale": 60.0, "training": 300.0, "strip": 120.0},
        "machine": "two cores",
    }


def test_the_report_shows_every_measure_of_every_model(tmp_path, arguments):
    table = write_report(tmp_path, **arguments)
    assert "| base | 33.8613 | 134.5 M | 6.4 |" in table and "| trained | 28.5646 | 143.4 M | 6.4 |" in table
    assert "| what is learned | 3.5000 | 2.1000 | -1.4000 |\n| what is kept | 3.0000 | 3.0000 | +0.0000 |" in table
    assert all(f"| {model} | 272 | 538,060,032 | 0123456789abcdef |" in table for model in ("base", "strip's"))
    assert "| upscale | 1.0 |\n| training | 5.0 |\n| strip | 2.0 |\n| all | 8.0 |" in table
    page = (tmp_path / "report.html").read_text()
    assert "upscaled &lt;text&gt;" in page and "upscale --base a" in page
    assert "took 5.0 minutes, everything below 8.0, on two cores." in page
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    kept = json.loads((tmp_path / "report.json").read_text())
    assert (kept["seconds"], kept["weights"]) == (arguments["seconds"], arguments["weights"])


def test_measures_and_weights_that_are_not_the_base_s_are_refused(tmp_path, arguments):
    arguments["weights"]["strip's"]["sha256"] = "f" * 64
    message = r"strip gave back .*'sha256': 'ffff.*; expected the base's .*0123456789abcdef"
    with pytest.raises(ValueError, match=message):
        write_report(tmp_path, **arguments)
    arguments["weights"]["strip's"] = WEIGHTS
    arguments["models"]["upscaled"]["perplexity"]["perplexity"] = 0.123
    with pytest.raises(ValueError, match="perplexity differs from the base's; expected equality to the last digit"):
        write_report(tmp_path, **arguments)


PRINTS = [sys.executable, "-c", "print('a table')"]
FAILS = [sys.executable, "-c", "raise SystemExit(3)"]


def test_files_of_a_person_stay(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    for folder in (tmp_path, tmp_path / "thesis.txt"):
        with pytest.raises(SystemExit, match="which holds files; expected a new or an empty folder, or that of a run"):
            Phases(folder, tmp_path / "default", 1, {})
    assert (tmp_path / "thesis.txt").read_text() == "mine"
    Phases(tmp_path / "new", tmp_path / "default", 1, {})
    assert (tmp_path / "new").is_dir()


def test_a_call_goes_on_from_the_phases_that_ended_and_counts_the_time_of_all_calls(tmp_path, capsys):
    first = Phases(tmp_path, tmp_path, 2, {"steps": 1})
    first.run("a", "doing a", 30, *PRINTS)
    with pytest.raises(SystemExit, match="failed with exit status 3; the same command begins again with it"):
        first.run("b", "doing b", 100, *FAILS)
    shown = capsys.readouterr().out
    assert "[1/2] doing a, about 30 s\n$ " in shown and "\na table\n" in shown
    assert "[2/2] doing b, about 1.7 min" in shown
    spent = first.seconds
    assert all(seconds > 0 for seconds in spent.values())

    second = Phases(tmp_path, tmp_path, 2, {"steps": 1})
    second.run("a", "doing a", 30, *FAILS)  # not run again
    second.run("b", "doing b", 100, *PRINTS)
    assert "[1/2] doing a: done, in " in capsys.readouterr().out
    assert second.seconds["a"] == spent["a"] and second.seconds["b"] > spent["b"]
    assert second.commands == first.commands


def test_a_slow_machine_is_expected_to_stay_slow(tmp_path, capsys):
    phases = Phases(tmp_path, tmp_path, 3, {})
    phases.run("a", "doing a", 30, *PRINTS)
    record = json.loads((tmp_path / "phases.json").read_text())
    record["phases"]["a"]["seconds"] = 120.0
    (tmp_path / "phases.json").write_text(json.dumps(record))
    assert Phases(tmp_path, tmp_path, 3, {}).announce("doing b", 10) == 40
    assert "doing b, about 40 s" in capsys.readouterr().out
    assert str(TrainingProgress(2, about=40)).endswith(
        "step 0 of 2, reading texts and model, about 40 s expected in all"
    )


@pytest.mark.parametrize("settings", [{"steps": 2}, {"steps": 1}])
def test_a_run_that_reached_the_end_or_has_other_settings_begins_anew(tmp_path, settings):
    earlier = Phases(tmp_path, tmp_path, 1, {"steps": 1})
    earlier.run("a", "doing a", 1, *PRINTS)
    if settings == {"steps": 1}:
        earlier.finish()
    (tmp_path / "model").mkdir()
    again = Phases(tmp_path, tmp_path, 1, settings)
    assert not again.seconds and not (tmp_path / "model").exists()


def test_what_a_command_prints_can_go_to_a_file_that_appears_whole_and_what_an_unfinished_one_left_is_removed(
    tmp_path, capsys
):
    phases = Phases(tmp_path, tmp_path, 3, {})
    for name in ("made", "trained"):
        (tmp_path / name).mkdir()
    phases.run("a", "doing a", 1, *PRINTS, output=tmp_path / "a.json", makes=tmp_path / "made")
    assert (tmp_path / "a.json").read_text() == "a table\n"
    assert "\na table" not in capsys.readouterr().out
    phases.run("b", "doing b", 1, *PRINTS, makes=tmp_path / "trained", steps=3)
    assert not (tmp_path / "made").exists() and (tmp_path / "trained").exists(), "training goes on from there"
    with pytest.raises(SystemExit):
        phases.run("c", "doing c", 1, *FAILS, output=tmp_path / "c.json")
    assert not (tmp_path / "c.json").exists()


def test_a_silent_command_says_how_far_it_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 0.05)
    told, progress = tmp_path / "told", module.TrainingProgress.__str__

    def noted(self) -> str:
        text = progress(self)
        if "step 1" in text:
            told.touch()
        return text

    monkeypatch.setattr(module.TrainingProgress, "__str__", noted)
    waits = f"""
import pathlib, time
print({{'loss': '3.25', 'epoch': 0.1}})
while not pathlib.Path({str(told)!r}).exists():
    time.sleep(0.01)
print('saved')
"""
    command = (sys.executable, "-c", waits)
    Phases(tmp_path, tmp_path, 1, {}).run("a", "training", 1, *command, makes=tmp_path / "m", steps=4)
    shown = capsys.readouterr().out
    assert ": step 1 of 4, loss 3.250, " in shown and "\nsaved\n" in shown and "{'loss'" not in shown


def test_training_counts_from_the_checkpoint_that_it_goes_on_from(monkeypatch):
    progress = TrainingProgress(50)
    for line in ("new layers train\n", "resuming from outputs/demo/trained/checkpoint-20\n"):
        assert progress.take(line)
    assert str(progress).endswith(": step 20 of 50, in step 21")
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 1000)
    assert not progress.take("{'eval_addresses_loss': '3.4'}\n")  # its time is no step's
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 1100)
    for loss in ("3.5", "3.25"):
        assert not progress.take(f"{{'loss': '{loss}', 'epoch': '0.1'}}\n")
    assert not progress.take("{'eval_articles_loss': '3.1'}\n")
    assert str(progress).endswith(": step 22 of 50, loss 3.250, about 23 min left")  # 28 steps of 50 s
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 1190)
    assert str(progress).endswith(", about 22 min left")
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 1400)
    assert str(progress).endswith(", loss 3.250, the next has taken 5 min, and those before 50 s each")
    for step in range(7):
        monkeypatch.setattr(time, "monotonic", lambda end=1400 + 10 * step: clock() + end)
        progress.take("{'loss': '3', 'epoch': '0.1'}\n")
    assert str(progress).endswith(": step 29 of 50, loss 3.000, about 3.5 min left"), "the last steps count"


def test_progress_says_what_is_being_done_and_what_takes_longer_than_expected(monkeypatch):
    clock, training, other = time.monotonic, TrainingProgress(1, measures_first=True), module.Progress(60)
    assert (
        str(training).endswith(": step 0 of 1, reading texts and model") and str(other) == "0 s so far, of about 60 s"
    )
    training.take("corpus: 3 sequences\n")
    assert str(training).endswith(": step 0 of 1, measuring held-out texts, then in step 1")
    training.take("{'loss': '3.25', 'epoch': '1'}\n")
    assert str(training).endswith(": step 1 of 1, loss 3.250, measuring held-out texts and saving")
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 420)
    assert str(other) == "7 min so far, longer than the expected 60 s"


def test_a_run_that_goes_on_does_not_measure_its_start_again(tmp_path):
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


def test_times_are_told_in_words():
    assert [duration(seconds) for seconds in (0.4, 89, 90, 120, 750)] == ["0 s", "89 s", "1.5 min", "2 min", "12 min"]


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


SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("number", by_default([signal.SIGTERM], SIGNALS), ids=lambda number: number.name)
def test_a_signal_lets_the_command_end_in_order_and_its_time_is_kept(number, tmp_path):
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
    assert out == "saved a checkpoint\n" and process.returncode == 128 + number
    assert err == "\ndemo: interrupted while doing a; the same command continues from here.\n"
    (phase,) = json.loads((tmp_path / module.RECORD).read_text())["phases"].values()
    assert phase["seconds"] > 0 and not phase["ended"]

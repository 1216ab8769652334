"""The whole demo, on a tiny model and few texts, and its report, which refuses an upscaled model that is not its base."""

import copy
import json
import sys

import pytest
import torch
from safetensors.torch import load_file

import demo.__main__ as demo
from demo.report import write_report
from material.smollm2 import tiny_llama


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

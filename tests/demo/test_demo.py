"""The whole demo, on a tiny model and few texts."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file

import demo.__main__ as demo
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

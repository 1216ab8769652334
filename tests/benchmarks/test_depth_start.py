"""The first steps of attention over the depth: which models are trained and measured, what is not done twice, and the table."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import depth_start
from benchmarks.depth_start import Row, table
from benchmarks.tracked import RESULTS, read


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """The commands that were given, none of which is run; losses follow from the rate."""
    given = []

    def run_once(output, *words):
        if output.exists():
            return
        given.append([str(word) for word in words])
        output.mkdir()
        if words[0] == "midus-train":
            recipe = recipe_of(given[-1])
            events = [{"step": 0, "eval_loss": 3.5}, {"step": recipe["max_steps"], "loss": 8.0}]
            events += [{"step": recipe["max_steps"], "eval_loss": 3.5 - recipe["learning_rate"]}]
            (output / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))

    texts = SimpleNamespace(train=tmp_path / "train", held_out=tmp_path / "held-out")
    monkeypatch.setattr(depth_start, "run_once", run_once)
    monkeypatch.setattr(depth_start, "addresses", lambda: texts)
    monkeypatch.setattr(depth_start, "smollm2_135m", lambda: tmp_path / "base")
    monkeypatch.setattr(depth_start, "DEPTH_START_RESULTS", tmp_path / "rows.csv")
    return given


def recipe_of(words):
    assert words[0] == "midus-train" and len(words) == 2
    return json.loads(Path(words[1]).read_text())


def run(tmp_path, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["depth_start", "--work", str(tmp_path / "work"), *words])
    depth_start.main()


def test_each_arm_is_trained_once_at_each_rate(commands, tmp_path, monkeypatch, capsys):
    run(tmp_path, monkeypatch, "--arms", "added", "--rates", "1e-3")
    run(tmp_path, monkeypatch, "--arms", "added,lora", "--rates", "1e-3,5e-3", "--gate-rates", ",1e-4")
    rows = read(tmp_path / "rows.csv")
    columns = ("arm", "rate", "gate_rate", "steps", "loss_before", "loss")
    assert [tuple(row[column] for column in columns) for row in rows] == [
        ("added", "0.001", "", "30", "3.5", "3.499"),
        ("added", "0.001", "0.0001", "30", "3.5", "3.499"),
        ("added", "0.005", "", "30", "3.5", "3.495"),
        ("added", "0.005", "0.0001", "30", "3.5", "3.495"),
        ("lora", "0.001", "", "30", "3.5", "3.499"),
        ("lora", "0.005", "", "30", "3.5", "3.495"),
    ]
    assert [words[0] for words in commands] == ["upscale"] + 6 * ["midus-train"]
    told = capsys.readouterr().out.splitlines()
    assert len(told) == (2 + 1) + (2 + 6)  # what was there is told again


def test_models_have_the_joining_and_the_seed_that_are_asked_for(commands, tmp_path, monkeypatch):
    words = ("--arms", "interpolated,lora", "--rates", "2e-3", "--gate-rates", "1e-4", "--steps", "7", "--seed", "2")
    run(tmp_path, monkeypatch, *words, "--max-tokens", "1024", "--no-append")
    upscaled, trained, adapted = commands
    assert upscaled[1:-1] == ["--base", str(tmp_path / "base"), "--method", "moda"] + [
        *("--set", "joining=interpolated", "--set", "layers=late:6", "--seed", "2", "--output")
    ]
    recipe, of_adapters = recipe_of(trained), recipe_of(adapted)
    assert recipe["model"] == upscaled[-1] and recipe["trainable"] == "new" and "adapters" not in recipe
    assert recipe["corpus"].endswith("train") and recipe["eval_text"].endswith("held-out")
    assert (recipe["learning_rate"], recipe["gate_learning_rate"], recipe["max_steps"]) == (2e-3, 1e-4, 7)
    assert (recipe["seed"], recipe["eval_max_tokens"]) == (2, 1024)
    assert of_adapters["model"] == str(tmp_path / "base") and "gate_learning_rate" not in of_adapters
    assert of_adapters["adapters"]["layers_to_transform"] == [24, 25, 26, 27, 28, 29]
    assert not (tmp_path / "rows.csv").exists()


def row(**changes) -> Row:
    of_run = dict.fromkeys(("date", "commit", "machine", "device", "torch", "triton", "transformers"), "")
    usual = {"arm": "added", "rate": 1e-3, "gate_rate": None, "steps": 30, "seed": 0, "max_tokens": 1}
    return Row(**of_run, **{**usual, "loss_before": 3.5, "loss": 3.25, **changes})


def test_the_table_tells_what_was_learned():
    assert table([row(), row(arm="lora", rate=5e-3, gate_rate=1e-4, loss=3.4)])[2:] == [
        "| added | 0.001 |  | 30 | 3.5000 | 3.2500 | 0.2500 |",
        "| lora | 0.005 | 0.0001 | 30 | 3.5000 | 3.4000 | 0.1000 |",
    ]


def test_rows_that_are_tracked_have_its_columns():
    (columns,) = {tuple(row) for row in read(RESULTS / "depth_start.csv")}
    assert columns == tuple(Row.__dataclass_fields__)

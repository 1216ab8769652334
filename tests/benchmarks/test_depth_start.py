"""The first steps of attention over the depth: which models are trained and measured, what is not done twice, and the table."""

import json
import math
import sys

import pytest
import torch
from models.depth_models import depth_model
from training.tiny_run import document, tiny_tokenizer

from benchmarks import depth_start
from benchmarks.depth_start import Row, measured_at, table
from benchmarks.tracked import RESULTS, read
from midus_hf.evaluation.perplexity import perplexity
from midus_hf.saved_models import load_model


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """The commands that were given, none of which is run; losses follow from the number of a head, and from steps."""
    given = []

    def run_once(output, *words):
        if output.exists():
            return
        given.append([str(word) for word in words])
        output.mkdir()
        if words[0] == "midus-train":
            steps = int(recipe_of(given[-1])["max_steps"])
            events = [{"step": 0, "eval_loss": 9.0}, {"step": steps, "loss": 8.0}]
            events += [{"step": steps, "eval_loss": 3.0 + steps}, {"step": steps, "train_runtime": 1.0}]
            (output / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))

    def measured_at(folder, text, weights, max_tokens):
        given.append(["measured_at", folder.name, text.name, *weights, max_tokens])
        return [(3.0 + weight, [weight / 4, weight / 2, weight]) for weight in weights]

    def split_articles(folder):
        return folder / "train.jsonl", folder / "held-out.jsonl"

    monkeypatch.setattr(depth_start, "run_once", run_once)
    monkeypatch.setattr(depth_start, "measured_at", measured_at)
    monkeypatch.setattr(depth_start, "split_articles", split_articles)
    monkeypatch.setattr(depth_start, "smollm2_135m", lambda: tmp_path / "base")
    monkeypatch.setattr(depth_start, "DEPTH_START_RESULTS", tmp_path / "rows.csv")
    return given


def recipe_of(words):
    assert words[0] == "midus-train" and len(words) == 2
    with open(words[1]) as file:
        return dict(line.rstrip("\n").split(": ") for line in file)


def run(tmp_path, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["depth_start", "--work", str(tmp_path / "work"), *words])
    depth_start.main()


def test_each_weight_is_measured_and_each_rate_trained_once(commands, tmp_path, monkeypatch, capsys):
    run(tmp_path, monkeypatch, "--depth-weights", "mixed", "--weights", "0,1", "--rates", "1e-4", "--steps", "1")
    run(tmp_path, monkeypatch, "--weights", "0,1e-3,1", "--rates", "1e-4", "--steps", "1,5")
    rows = read(tmp_path / "rows.csv")
    columns = ("depth_weight", "weight", "rate", "steps", "loss")
    assert [tuple(row[column] for column in columns) for row in rows] == [
        ("mixed", "0.0", "", "0", "3.0"),
        ("mixed", "1.0", "", "0", "4.0"),
        ("mixed", "", "0.0001", "1", "4.0"),
        ("mixed", "0.001", "", "0", "3.001"),
        ("multiplied", "0.0", "", "0", "3.0"),
        ("multiplied", "0.001", "", "0", "3.001"),
        ("multiplied", "1.0", "", "0", "4.0"),
        ("mixed", "", "0.0001", "5", "8.0"),
        ("multiplied", "", "0.0001", "1", "4.0"),
        ("multiplied", "", "0.0001", "5", "8.0"),
    ]
    assert rows[1]["shares"] == "0.250000 0.500000 1.000000" and rows[2]["shares"] == ""
    measured = [words[1:] for words in commands if words[0] == "measured_at"]
    assert measured == [
        ["mixed-0", "held-out.jsonl", 0.0, 1.0, 2048],
        ["mixed-0", "held-out.jsonl", 0.001, 2048],
        ["multiplied-0", "held-out.jsonl", 0.0, 0.001, 1.0, 2048],
    ]
    assert [words[0] for words in commands if words[0] != "measured_at"] == ["upscale", "midus-train"] + [
        *("upscale", "midus-train", "midus-train", "midus-train")
    ]
    told = capsys.readouterr().out.splitlines()
    assert len(told) == (2 + 3) + (2 + 10)  # what was there is told again


def test_models_have_the_weight_and_the_seed_that_are_asked_for(commands, tmp_path, monkeypatch):
    words = ("--depth-weights", "multiplied", "--weights", "0", "--rates", "1e-3", "--steps", "30", "--seed", "2")
    run(tmp_path, monkeypatch, *words, "--max-tokens", "1024", "--no-append")
    upscaled, _, trained = commands
    assert upscaled[1:-1] == ["--base", str(tmp_path / "base"), "--method", "moda"] + [
        *("--set", "depth_weight=multiplied", "--seed", "2", "--output")
    ]
    recipe = recipe_of(trained)
    assert recipe["model"] == upscaled[-1] and recipe["trainable"] == "new" and recipe["seed"] == "2"
    assert recipe["corpus"].endswith("train.jsonl") and recipe["eval_text"].endswith("held-out.jsonl")
    assert (recipe["learning_rate"], recipe["max_steps"], recipe["eval_max_tokens"]) == ("1e-3", "30", "1024")
    assert (recipe["schedule"], recipe["warmup_ratio"]) == ("constant_with_warmup", "0")
    assert not (tmp_path / "rows.csv").exists()


@pytest.mark.parametrize("depth_weight", ["mixed", "multiplied"])
def test_a_model_is_measured_with_the_number_of_every_head(depth_weight, tmp_path):
    depth_model(dtype=torch.float32, depth_weight=depth_weight).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    texts = [document(90, number) for number in range(4)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    found = measured_at(tmp_path / "model", tmp_path / "text.jsonl", [0.0, 0.5, 1.0], 256)
    for value, (loss, shares) in zip([0.0, 0.5, 1.0], found, strict=True):
        model, _ = load_model(str(tmp_path / "model"))
        for layer in model.model.layers[1:]:
            layer.memories["depth-attention"].depth_weight.data = torch.full((4,), value)
        expected = perplexity(model, tiny_tokenizer(), texts, max_tokens=256)
        assert loss == pytest.approx(math.log(expected.perplexity), rel=1e-6)
        assert len(shares) == 3 and all(share == 0 if value == 0 else 0 < share < 1 for share in shares)
    half, whole = found[1][1], found[2][1]
    assert all(of_half < of_whole for of_half, of_whole in zip(half, whole, strict=True))


def row(**changes) -> Row:
    of_run = dict.fromkeys(("date", "commit", "machine", "device", "torch", "triton", "transformers"), "")
    usual = {
        "depth_weight": "mixed",
        "weight": None,
        "rate": None,
        "steps": 0,
        "seed": 0,
        "max_tokens": 1,
        "shares": "",
    }
    return Row(**of_run, **{**usual, "loss": 2.5, **changes})


def test_the_table_tells_what_is_set_and_what_is_trained():
    rows = [row(weight=1e-4, shares="0.900000 0.200000 0.500000 0.300000"), row(rate=1e-3, steps=30, loss=3.25)]
    assert table(rows)[2:] == [
        "| mixed | 0.0001 |  | 0 | 2.5000 | 30.0% to 50.0% |",
        "| mixed | trained | 0.001 | 30 | 3.2500 |  |",
    ]


def test_rows_that_are_tracked_have_its_columns():
    (columns,) = {tuple(row) for row in read(RESULTS / "depth_start.csv")}
    assert columns == tuple(Row.__dataclass_fields__)

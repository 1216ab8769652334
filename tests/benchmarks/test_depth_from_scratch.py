"""Attention over the depth from scratch: which models are trained on what, what is not done twice, and the table."""

import json
import sys

import pytest

from benchmarks import depth_from_scratch, split_articles
from benchmarks.depth_from_scratch import ARMS, Row, config_of, table
from benchmarks.tracked import read
from midus_config.parameters import count_parameters

LOSSES = {"none": 4.0, "attention": 3.5, "attention+ffn": 3.25}
ARTICLES = ["A title"] + [f"{index} " + "x" * 200 for index in range(20)]


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """The commands that were given, none of which is run; losses follow from the arm and the seed."""
    (tmp_path / "articles.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ARTICLES))
    given = []

    def run_once(output, *words):
        given.append([str(word) for word in words])
        output.mkdir()
        events = [{"train_runtime": 1.5}, {"eval_loss": 9.0}, {"train_runtime": 3.0}]
        (output / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))

    def run_command(command, model, *words):
        given.append([command, str(model), *map(str, words)])
        _, slots, _, _, _, seed = model.name.replace("3e-3", "rate").split("-")
        return json.dumps(
            {"models": [{"perplexity": {"perplexity": 2.718281828459045 ** (LOSSES[slots] + int(seed))}}]}
        )

    monkeypatch.setattr(depth_from_scratch, "run_once", run_once)
    monkeypatch.setattr(depth_from_scratch, "run_command", run_command)
    monkeypatch.setattr(split_articles, "articles", lambda: tmp_path / "articles.jsonl")
    monkeypatch.setattr(depth_from_scratch, "small_tokenizer", lambda folder, texts, vocabulary: folder)
    monkeypatch.setattr(depth_from_scratch, "DEPTH_FROM_SCRATCH_RESULTS", tmp_path / "rows.csv")
    return given


def run(tmp_path, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["depth_from_scratch", "--work", str(tmp_path / "work"), *words])
    depth_from_scratch.main()


def test_every_arm_is_trained_and_measured_once_for_each_seed(commands, tmp_path, monkeypatch, capsys):
    run(tmp_path, monkeypatch, "--arms", "pre-none,pre-attention+ffn", "--seeds", "0")
    run(tmp_path, monkeypatch, "--arms", "pre-none,pre-attention+ffn", "--seeds", "0,1")
    rows = read(tmp_path / "rows.csv")
    assert [(row["slots"], row["seed"], row["seconds"]) for row in rows] == [
        ("none", "0", "3.0"),
        ("attention+ffn", "0", "3.0"),
        ("none", "1", "3.0"),
        ("attention+ffn", "1", "3.0"),
    ]
    assert [float(row["loss"]) for row in rows] == pytest.approx([4.0, 3.25, 5.0, 4.25])
    assert [words[0] for words in commands] == ["midus-train", "midus-eval"] * 4
    assert "4.5000 (4.0000 to 5.0000)" in capsys.readouterr().out


def test_models_of_another_length_or_rate_are_others(commands, tmp_path, monkeypatch):
    for words in (["--steps", "5"], ["--layers", "3"], ["--layers", "3", "--steps", "5"], ["--rate", "3e-3"]):
        run(tmp_path, monkeypatch, "--arms", "pre-none", "--seeds", "0", "--no-append", *words)
    assert len({words[-1] for words in commands if words[0] == "midus-train"}) == 4
    assert not (tmp_path / "rows.csv").exists()


def test_held_out_articles_are_long_ones_that_are_not_trained_on(commands, tmp_path, monkeypatch):
    run(tmp_path, monkeypatch, "--arms", "post-none", "--seeds", "1", "--no-append")
    (recipe, held_out) = (tmp_path / "work" / "post-none-12-320-3e-3-1.yaml", tmp_path / "work" / "held-out.jsonl")
    lines = dict(line.split(": ") for line in recipe.read_text().splitlines())
    assert lines["corpus"] == str(tmp_path / "work" / "train.jsonl") and lines["seed"] == "1"
    assert commands[1][-1] == str(held_out)
    kept = {json.loads(line)["text"] for line in held_out.read_text().splitlines()}
    trained = {json.loads(line)["text"] for line in open(lines["corpus"])}
    assert kept == {ARTICLES[1], ARTICLES[11]} and trained == set(ARTICLES[1:]) - kept


@pytest.mark.parametrize("norms", ["pre", "post"])
def test_attention_slots_are_for_free_and_the_last_layer_projects_nothing(norms):
    none, attention, both = (count_parameters(config_of(norms, slots, 6)).total for slots in LOSSES)
    assert attention == none
    assert both - attention == 5 * 2 * 96 * 32


def test_arms_are_two_norms_with_three_kinds_of_slots():
    assert sorted(ARMS.values()) == sorted((norms, slots) for norms in ("pre", "post") for slots in LOSSES)


def row(norms: str, slots: str, seed: int, loss: float) -> Row:
    of_run = dict.fromkeys(("date", "commit", "machine", "device", "torch", "triton", "transformers"), "")
    numbers = {"layers": 2, "parameters": 1000, "flops_per_token": 2e6, "trained_tokens": 1, "seconds": 10.0 + seed}
    return Row(**of_run, **numbers, norms=norms, slots=slots, seed=seed, loss=loss)


def test_differences_are_from_the_same_norms_and_seed():
    rows = [row("pre", "none", 0, 4.0), row("pre", "none", 1, 5.0), row("post", "none", 0, 3.0)]
    rows += [row("pre", "attention", 1, 4.5), row("pre", "attention", 0, 3.75), row("post", "attention", 0, 3.125)]
    assert table(rows)[2:] == [
        "| pre | none | 1,000 | 2.00 | 10 | 4.5000 (4.0000 to 5.0000) |  |",
        "| post | none | 1,000 | 2.00 | 10 | 3.0000 |  |",
        "| pre | attention | 1,000 | 2.00 | 10 | 4.1250 (3.7500 to 4.5000) | -0.3750 (-0.5000 to -0.2500) |",
        "| post | attention | 1,000 | 2.00 | 10 | 3.1250 | +0.1250 |",
    ]


def test_without_the_model_without_slots_there_is_no_difference():
    assert table([row("pre", "attention", 0, 4.0)])[2:] == ["| pre | attention | 1,000 | 2.00 | 10 | 4.0000 |  |"]

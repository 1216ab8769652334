"""A run holds out a share of its texts, chosen by the text, and ends with what it learned and forgot."""

import json

import pytest
import torch
from training.outcomes import weights
from training.tiny_run import document, refused
from transformers import AutoModelForCausalLM, AutoTokenizer

from midus_hf.data.held_out import belongs_to_share
from midus_hf.training.outcome import HELD_OUT, OWN_TEXT, describe_outcome, write_own_texts
from midus_hf.training.run import run_training

RATES = "learning_rate 0.001"


def log_of(before, after, losses=(), name=HELD_OUT, steps=10):
    measured = [{"step": 0, f"eval_{name}_loss": before}, {"step": steps, f"eval_{name}_loss": after}]
    return [*({"step": step, "loss": loss} for step, loss in enumerate(losses, start=1)), *measured]


@pytest.mark.parametrize(
    ("log", "line", "warning"),
    [
        (log_of(3.0, 2.5), "held-out texts: 3.0000 nats per token before training, 2.5000 after (-0.5000)", None),
        (
            log_of(3.0, 2.995),
            "held-out texts",
            "nothing was learned of measured texts: train for more steps, or at higher rates",
        ),
        (
            log_of(3.0, 3.2),
            "held-out texts",
            "the trained model is worse than the one before on held-out texts: train again",
        ),
        (log_of(3.0, 3.02, name=OWN_TEXT), "texts that the model wrote before training", None),
        (
            log_of(3.0, 3.2, name=OWN_TEXT),
            "texts that",
            "the model forgets: texts that the model wrote before training lost 0.20",
        ),
        (
            log_of(3.0, 3.2, name="articles"),
            "articles: 3.0000",
            "the trained model is worse than the one before on articles",
        ),
        (
            log_of(3.0, 2.5, [3.0, 2.9, 2.8, 2.7, 2.9, 3.1]),
            "held-out",
            "the training loss rose by 0.25 nats in the last third",
        ),
        (log_of(3.0, 2.5, [3.0, 2.9, 2.8, 2.7, 2.6, 2.5]), "held-out", None),
    ],
)
def test_outcome_has_a_line_and_a_warning_with_its_remedy(log, line, warning):
    lines, warnings = describe_outcome(log, 10, RATES)
    assert len(lines) == 1
    assert lines[0].startswith(line)
    assert len(warnings) == (warning is not None)
    if warning is not None:
        assert warnings[0].startswith(warning)
        assert RATES in warnings[0]


def test_unchanged_text_is_no_warning_if_another_is_learned():
    log = [*log_of(3.0, 2.5), *log_of(3.0, 2.998, name="articles")]
    assert describe_outcome(log, 10, RATES)[1] == []
    log = [*log_of(3.0, 2.999), *log_of(3.0, 2.998, name="articles")]
    assert [warning[:27] for warning in describe_outcome(log, 10, RATES)[1]] == ["nothing was learned of meas"]


def test_outcome_names_the_divergence_from_the_base():
    lines, _ = describe_outcome([{"step": 5, "base_divergence": 0.5}, {"step": 9, "base_divergence": 0.25}], 9, RATES)
    assert lines == ["divergence from the base on the texts trained on: 0.2500 nats per token at the end"]


def test_run_in_bfloat16_is_measured_too(rows, config_for, capsys, monkeypatch):
    monkeypatch.setattr("midus_hf.training.rates._BFLOAT16_NOISE", 0.0)  # a tiny model gains little
    run_training(config_for(corpus=rows(), eval_share=0.1, learning_rate=None, max_steps=2, bf16=True))
    out = capsys.readouterr().out
    assert "a first step helps these texts most at" in out
    assert "texts that the model wrote before training: " in out


def test_outcome_of_the_saved_step_counts():
    log = [*log_of(3.0, 2.5, steps=5), *log_of(3.0, 2.9, steps=10)]
    assert "2.5000 after" in describe_outcome(log, 5, RATES)[0][0]
    assert describe_outcome(log, 7, RATES) == ([], [])


def held_out_of(texts, share):
    return [text for text in texts if belongs_to_share(text, share)]


@pytest.fixture
def rows(tmp_path):
    texts = [document(40, number) for number in range(60)]

    def write(order=1):
        path = tmp_path / f"rows{order}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[::order]))
        return path

    write.texts = texts
    return write


def test_share_is_decided_by_the_text():
    texts = [document(10, number) for number in range(2000)]
    held = held_out_of(texts, 0.05)
    assert 60 < len(held) < 140
    assert {*held} <= {*held_out_of(texts, 0.1)}
    assert not held_out_of(texts, 0.0)


@pytest.mark.parametrize("streaming", [False, True])
def test_held_out_documents_are_measured_and_not_trained_on(streaming, rows, config_for, tmp_path, capsys):
    seen = []
    for order in (1, -1):
        output = f"out{order}{streaming}"
        keys = {"eval_share": 0.1, "max_steps": 4, "streaming": streaming}
        result = run_training(config_for(output, corpus=rows(order), **keys))
        seen.append([event["eval_held_out_loss"] for event in result.log if "eval_held_out_loss" in event])
    assert len(seen[0]) == 2
    assert seen[0][0] == pytest.approx(seen[1][0], rel=0.2)  # the same texts, packed in another order
    out = capsys.readouterr().out
    assert "held-out texts: " in out
    assert "texts that the model wrote before training: " in out
    tokenizer, count = AutoTokenizer.from_pretrained(tmp_path / output), len(held_out_of(rows.texts, 0.1))
    assert 0 < count < 20
    if not streaming:
        assert f"{count} of 60 documents are held out" in out
        tokens = sum(len(tokenizer(text)["input_ids"]) + 1 for text in rows.texts)
        kept = sum(len(tokenizer(text)["input_ids"]) + 1 for text in rows.texts if not belongs_to_share(text, 0.1))
        assert f"of {kept:,} tokens are read" in out
        assert kept < tokens
    card = (tmp_path / output / "README.md").read_text()
    assert "| held_out | " in card


def test_few_documents_are_all_trained_on(config_for, tmp_path, capsys):
    (tmp_path / "one.txt").write_text(document(200, 1))
    run_training(config_for("shared", corpus=tmp_path / "one.txt", eval_share=0.05, max_steps=2))
    assert "corpus: 1 documents are too few to hold out 5% of them" in capsys.readouterr().err
    run_training(config_for("whole", corpus=tmp_path / "one.txt", max_steps=2))
    shared, whole = weights(tmp_path / "shared"), weights(tmp_path / "whole")
    assert all(torch.equal(shared[name], whole[name]) for name in whole)


@pytest.mark.parametrize("streaming", [False, True])
def test_run_trains_as_if_held_out_texts_were_missing(streaming, rows, config_for, tmp_path):
    keys = {"max_steps": 4, "streaming": streaming}
    result = run_training(config_for("with", corpus=rows(), eval_share=0.1, **keys))
    assert any("eval_own_text_loss" in event for event in result.log)
    texts = [text for text in rows.texts if not belongs_to_share(text, 0.1)]
    kept = tmp_path / "kept.jsonl"
    kept.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    run_training(config_for("without", corpus=kept, **keys))
    without, trained = weights(tmp_path / "without"), weights(tmp_path / "with")
    assert all(torch.equal(without[name], trained[name]) for name in without)


def test_own_texts_leave_random_numbers_and_mode(upscaled):
    model = AutoModelForCausalLM.from_pretrained(upscaled()).train()
    tokenizer, state = AutoTokenizer.from_pretrained(upscaled()), torch.get_rng_state()
    written = write_own_texts(model, tokenizer, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert {len(ids) for ids in written["input_ids"]} == {49}
    assert written["input_ids"] == write_own_texts(model, tokenizer, seed=3)["input_ids"]


def test_share_and_text_are_not_both_given(config_for):
    with refused("eval_share is 0.05, and eval_text is 'x'; expected one of them"):
        config_for(eval_share=0.05, eval_text="x")
    with refused("eval_share is 1.0; expected a share from 0 to below 1"):
        config_for(eval_share=1.0)

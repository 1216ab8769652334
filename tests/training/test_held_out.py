"""Held-out text is measured as `midus-eval` measures it, changes nothing, and picks the model and the end."""

import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import FAMILIES, save_tiny_model
from training.test_interruption import interrupted
from training.test_run import exact_log
from training.tiny_run import best_at, give_held_out_losses, tiny_config, tiny_tokenizer, write_corpus

from midus_hf.evaluation.evaluate import evaluate
from midus_hf.evaluation.settings import EvaluationSettings
from midus_hf.training.data.held_out import best_step, is_stopped_early
from midus_hf.training.output.output_folder import check_output
from midus_hf.training.output.run_checkpoints import last_checkpoint
from midus_hf.training.run.train import prepare, train
from midus_hf.training.run.training_log import read_log
from upscalers.runs.upscale import upscale


@pytest.fixture(scope="module")
def held_out(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("held_out") / "texts", documents=3, length=100)


def measured(output: Path) -> dict[int, float]:
    events = [event for event in read_log(output / "log.jsonl") if "perplexity" in event]
    assert all(math.log(event["perplexity"]) == pytest.approx(event["eval_loss"]) for event in events)
    return {event["step"]: event["perplexity"] for event in events}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_perplexity_is_that_of_the_evaluation_command(family, upscaled, corpus, held_out, tmp_path):
    output = tmp_path / "out"
    model = upscaled(family)
    train(tiny_config(model, corpus, output, max_steps=6, eval_text=str(held_out), eval_every=4, trainable="all"))
    scores = measured(output)
    assert list(scores) == [0, 4, 6]
    settings = EvaluationSettings(text=str(held_out), device="cpu")
    before, after = (
        report["perplexity"]["perplexity"] for report in evaluate([str(model), str(output)], settings)["models"]
    )
    assert (scores[0], scores[6]) == (pytest.approx(before, rel=1e-6), pytest.approx(after, rel=1e-6))
    assert scores[6] != pytest.approx(scores[0], rel=1e-3)


@pytest.mark.parametrize(
    "changes", [{}, {"precision": "bf16"}, {"method": "midus-pkm"}], ids=["fp32", "bf16", "batch_norm"]
)
def test_measuring_changes_nothing_that_is_computed(changes, upscaled, corpus, held_out, tmp_path):
    changes = dict(changes)
    model = upscaled("llama") if "method" not in changes else with_batch_norm(tmp_path / "pkm", changes.pop("method"))
    train(tiny_config(model, corpus, tmp_path / "without", max_steps=6, **changes))
    train(tiny_config(model, corpus, tmp_path / "with", max_steps=6, eval_text=str(held_out), eval_every=1, **changes))
    assert len(measured(tmp_path / "with")) == 7
    assert exact_log(tmp_path / "with") == exact_log(tmp_path / "without")
    assert same_weights(tmp_path / "with", tmp_path / "without")


def with_batch_norm(folder: Path, method: str) -> Path:
    base = save_tiny_model("llama", folder / "base")
    upscale(
        base=base, method=method, output=folder / "model", num_new_layers=2, options={"n": 8, "k": 2}, verify=False
    )
    tiny_tokenizer().save_pretrained(folder / "model")
    assert any("mean" in name for name in load_file(folder / "model" / "model.safetensors"))
    return folder / "model"


def same_weights(first: Path, second: Path) -> bool:
    one, other = (load_file(folder / "model.safetensors") for folder in (first, second))
    return all(torch.equal(one[name], other[name]) for name in one)


def test_the_best_model_is_kept_and_saved(upscaled, corpus, held_out, tmp_path, monkeypatch, capsys):
    give_held_out_losses(monkeypatch, best_at(9))
    options = {"max_steps": 24, "eval_every": 3, "eval_text": str(held_out), "keep_best": True, "keep_checkpoints": 1}
    model = shutil.copytree(upscaled("llama"), tmp_path / "model")
    result = train(tiny_config(model, corpus, tmp_path / "out", save_every=12, **options))
    scores = measured(tmp_path / "out")
    best = 9
    assert (result.best_step, result.steps) == (best, 24)
    assert last_checkpoint(tmp_path / "out").name == "checkpoint-24"
    assert sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*")) == sorted(
        {f"checkpoint-{best}", "checkpoint-24"}
    )
    assert same_weights(tmp_path / "out", tmp_path / "out" / f"checkpoint-{best}")
    said = f"Saved is the model after step {best}, the best: held-out perplexity {scores[best]:.4f}, at the end {scores[24]:.4f}."
    assert said in capsys.readouterr().err
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"The weights are those after step {best}, where held-out text was predicted best." in card
    assert str(held_out.parent) not in card and "eval_text: texts" in card

    again = train(tiny_config(model, corpus, tmp_path / "out", save_every=12, resume=True, **options))
    assert again.best_step == best and same_weights(tmp_path / "out", tmp_path / "out" / f"checkpoint-{best}")
    shutil.rmtree(tmp_path / "out" / f"checkpoint-{best}")
    assert train(tiny_config(model, corpus, tmp_path / "out", save_every=12, resume=True, **options)).best_step == 24
    assert f"The best model, after step {best}, has no checkpoint any more" in capsys.readouterr().err


def test_a_last_model_that_is_the_best_is_saved_as_it_is(upscaled, corpus, held_out, tmp_path, monkeypatch, capsys):
    give_held_out_losses(monkeypatch, best_at(4))
    options = {"max_steps": 4, "eval_text": str(held_out), "eval_every": 2, "keep_best": True}
    result = train(tiny_config(upscaled("llama"), corpus, tmp_path / "out", **options))
    assert result.best_step == 4
    assert "The last model is the best by held-out text: held-out perplexity " in capsys.readouterr().err
    assert "weights are those after" not in (tmp_path / "out" / "README.md").read_text()


def test_it_stops_after_evaluations_without_a_better_one_and_is_then_finished(
    upscaled, corpus, held_out, tmp_path, monkeypatch
):
    give_held_out_losses(monkeypatch, best_at(6))
    options = {"max_steps": 200, "eval_every": 3, "eval_text": str(held_out), "early_stop": 2, "save_every": 50}
    result = train(tiny_config(upscaled("llama"), corpus, tmp_path / "out", **options))
    assert result.steps == 6 + 2 * 3 and result.best_step is None
    assert last_checkpoint(tmp_path / "out").name == "checkpoint-12"
    weights = (tmp_path / "out" / "model.safetensors").read_bytes()
    again = train(tiny_config(upscaled("llama"), corpus, tmp_path / "out", resume=True, **options))
    assert (again.steps, again.tokens_per_second) == (result.steps, None), "it had ended"
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == weights
    further = {**options, "early_stop": 3}
    assert train(tiny_config(upscaled("llama"), corpus, tmp_path / "out", resume=True, **further)).steps == 6 + 3 * 3


def test_an_interrupted_run_measures_as_the_uninterrupted_one(upscaled, corpus, held_out, tmp_path):
    options = {"max_steps": 12, "eval_text": str(held_out), "eval_every": 3, "keep_best": True, "early_stop": 9}
    train(tiny_config(upscaled("llama"), corpus, tmp_path / "whole", **options))
    interrupted(tiny_config(upscaled("llama"), corpus, tmp_path / "parts", **options), 7)
    train(tiny_config(upscaled("llama"), corpus, tmp_path / "parts", resume=True, **options))
    assert measured(tmp_path / "parts") == measured(tmp_path / "whole")
    assert list(measured(tmp_path / "parts")) == [0, 3, 6, 9, 12]
    assert exact_log(tmp_path / "parts") == exact_log(tmp_path / "whole")
    assert same_weights(tmp_path / "parts", tmp_path / "whole")


def test_room_is_made_for_the_best_checkpoint(upscaled, corpus, held_out, tmp_path):
    options = {"eval_text": str(held_out), "eval_every": 2, "keep_checkpoints": 1}
    rooms = [
        prepare(
            tiny_config(upscaled("llama"), corpus, tmp_path / str(best), keep_best=best, save_every=5, **options)
        ).room
        for best in (False, True)
    ]
    assert [(room.written, room.kept) for room in rooms] == [(2, 1), (3, 2)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval_text": "/absent"}, "text is '/absent', which does not exist"),
        ({"eval_text": "short"}, "which cannot be measured: the text has 4 tokens to predict; expected at least"),
        ({"eval_text": "texts", "eval_max_tokens": 5}, "max_tokens is 5; expected at least one window of 128 tokens."),
        ({"eval_text": "out/held"}, "which holds the eval_text"),
    ],
)
def test_held_out_text_is_checked_at_the_start(changes, message, upscaled, corpus, held_out, tmp_path):
    (tmp_path / "short").write_text("w5 w6 w7 w8 w9")
    shutil.copytree(held_out, tmp_path / "texts")
    (tmp_path / "out" / "held").mkdir(parents=True)
    output = tmp_path / ("out" if changes["eval_text"].startswith("out") else "new")
    changes = {**changes, "eval_text": str(tmp_path / changes["eval_text"])}
    with pytest.raises(ValueError, match=re.escape(message)):
        train(tiny_config(upscaled("llama"), corpus, output, overwrite=True, **changes))
    assert not (tmp_path / "new").exists() and not any((tmp_path / "out" / "held").iterdir())


def test_another_text_cannot_be_compared_with_the_one_before(upscaled, corpus, held_out, tmp_path):
    options = {"max_steps": 2, "save_every": 1, "eval_text": str(held_out)}
    train(tiny_config(upscaled("llama"), corpus, tmp_path / "out", **options))
    options["eval_text"] = str(shutil.copytree(held_out, tmp_path / "other"))
    with pytest.raises(ValueError, match=r"eval_text is '.*other', but the run to resume has '.*texts'"):
        check_output(tiny_config(upscaled("llama"), corpus, tmp_path / "out", resume=True, **options))


def test_the_best_step_is_the_first_of_the_smallest_loss():
    assert best_step({}) is None and not is_stopped_early({}, 1)
    losses = {3: 2.0, 6: 1.0, 9: 1.0, 12: 1.5}
    assert best_step(losses) == 6
    assert [is_stopped_early(losses, patience) for patience in (None, 1, 2, 3)] == [False, True, True, False]

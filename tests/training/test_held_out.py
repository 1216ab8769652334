"""Held-out texts are measured as `midus eval` measures them, change nothing, and the first picks the model and the end."""

import math
import re
import shutil
from pathlib import Path

import pytest
from pairs import by_default
from tiny import FAMILIES
from training.outcomes import assert_same_run, by_step, exact_log, moved
from training.steered_runs import interrupted
from training.tiny_run import best_at, give_held_out_losses, refused, write_corpus
from transformers import TrainerControl, TrainerState

from midus_hf.config.yaml_options import from_mapping, read_config
from midus_hf.evaluation.evaluate import evaluate
from midus_hf.evaluation.settings import EvaluationSettings
from midus_hf.training.options import TrainConfig
from midus_hf.training.output.output_folder import add_training, check_output
from midus_hf.training.output.run_checkpoints import last_checkpoint
from midus_hf.training.run.callbacks import ProgressTable, TrainingClock
from midus_hf.training.run.held_out import best_step, describe_held_out, held_out_losses, is_stopped_early
from midus_hf.training.run.train import prepare, train

NEEDED = {"model_name_or_path": "m", "output_dir": "o", "corpus": "c"}


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> dict[str, str]:
    """Write two texts; return their paths by their names."""
    folder = tmp_path_factory.mktemp("held_out")
    lengths = {"near": 100, "wiki-2": 150}
    return {name: str(write_corpus(folder / name, documents=3, length=length)) for name, length in lengths.items()}


@pytest.fixture
def held_out(texts) -> Path:
    """Return the path of a text that has no name."""
    return Path(texts["near"])


def measured(output: Path) -> dict[int, float]:
    """Return perplexities of a text that has no name, by step."""
    for event in exact_log(output, "perplexity"):
        assert math.log(event["perplexity"]) == pytest.approx(event["eval_loss"])
    return by_step(output, "perplexity")


def assert_measured_by_the_command(model: Path, output: Path, text: str, scores: dict[int, float]) -> None:
    """Compare perplexities before and after training with those of `midus eval`."""
    reports = evaluate([str(model), str(output)], EvaluationSettings(text=text, device="cpu"))["models"]
    before, after = (report["perplexity"]["perplexity"] for report in reports)
    assert list(scores) == [0, 4, 6]
    assert (scores[0], scores[6]) == (pytest.approx(before, rel=1e-6), pytest.approx(after, rel=1e-6))
    assert scores[6] != pytest.approx(scores[0], rel=1e-3)


@pytest.mark.parametrize("family", by_default(["llama", "gemma3"], FAMILIES))
def test_the_last_perplexity_is_that_of_the_evaluation_command(family, upscaled, config_for, held_out, tmp_path):
    train(config_for("out", family, max_steps=6, eval_text=str(held_out), eval_steps=4, trainable="all"))
    assert_measured_by_the_command(upscaled(family), tmp_path / "out", str(held_out), measured(tmp_path / "out"))


def test_each_of_several_is_measured_as_the_evaluation_command_measures_it(
    upscaled, config_for, texts, tmp_path, capsys
):
    output = tmp_path / "out"
    train(config_for(max_steps=6, eval_text=texts, eval_steps=4, trainable="all"))
    first, *_ = events = exact_log(output, "eval_near_loss")
    assert all("eval_wiki-2_loss" in event and "eval_loss" not in event for event in events)
    for name, path in texts.items():
        assert_measured_by_the_command(upscaled(), output, path, by_step(output, f"eval_{name}_perplexity"))
    said = capsys.readouterr().out
    assert "held-out text near: 299 tokens to predict" in said
    assert "held-out text wiki-2: 449 tokens to predict" in said
    near, wiki = (first[f"eval_{name}_perplexity"] for name in texts)
    assert f"perplexity of near {near:.4f}, wiki-2 {wiki:.4f}\n" in said
    assert "eval_text:\n  near: near\n  wiki-2: wiki-2\n" in (output / "README.md").read_text()


@pytest.mark.parametrize("changes", [{"bf16": True}, {"method": "midus-pkm"}], ids=["bf16", "batch_norm"])
def test_measuring_changes_nothing_that_is_computed(changes, upscaled, config_for, held_out, tmp_path):
    method, bf16 = changes.get("method", "midus-hml"), changes.get("bf16", False)
    options = {"model": upscaled("llama", method), "bf16": bf16, "max_steps": 6}
    train(config_for("without", **options))
    train(config_for("with", eval_text=str(held_out), eval_steps=1, **options))
    assert len(measured(tmp_path / "with")) == 7
    assert exact_log(tmp_path / "with", "loss") == exact_log(tmp_path / "without")
    assert moved(tmp_path / "with", tmp_path / "without") == set()


def test_the_best_model_is_kept_and_saved(upscaled, config_for, held_out, tmp_path, monkeypatch, capsys):
    give_held_out_losses(monkeypatch, best_at(9))
    model, output = shutil.copytree(upscaled(), tmp_path / "model"), tmp_path / "out"
    options = {
        "max_steps": 24,
        "eval_steps": 3,
        "eval_text": str(held_out),
        "load_best_model_at_end": True,
        "save_total_limit": 1,
    }
    options |= {"model": model, "save_steps": 12}
    result = train(config_for(**options))
    scores, best = measured(output), output / "checkpoint-9"
    assert (result.best_step, result.steps) == (9, 24)
    assert last_checkpoint(output).name == "checkpoint-24"
    assert {path.name for path in output.glob("checkpoint-*")} == {"checkpoint-9", "checkpoint-24"}
    assert moved(output, best) == set()
    said = (
        f"Saved is the model after step 9, the best: held-out perplexity {scores[9]:.4f}, at the end {scores[24]:.4f}."
    )
    assert said in capsys.readouterr().err
    card = (output / "README.md").read_text()
    assert "The weights are those after step 9, where held-out text was predicted best." in card
    assert str(held_out.parent) not in card and "eval_text: near" in card

    again = train(config_for(resume_from_checkpoint=True, **options))
    assert again.best_step == 9 and moved(output, best) == set()
    shutil.rmtree(best)
    assert train(config_for(resume_from_checkpoint=True, **options)).best_step == 24
    assert "The best model, after step 9, has no checkpoint any more" in capsys.readouterr().err


def test_a_last_model_that_is_the_best_is_saved_as_it_is(config_for, held_out, tmp_path, monkeypatch, capsys):
    give_held_out_losses(monkeypatch, best_at(4))
    options = {"max_steps": 4, "eval_text": str(held_out), "eval_steps": 2, "load_best_model_at_end": True}
    assert train(config_for(**options)).best_step == 4
    assert "The last model is the best by held-out text: held-out perplexity " in capsys.readouterr().err
    assert "weights are those after" not in (tmp_path / "out" / "README.md").read_text()


def test_it_stops_after_evaluations_without_a_better_one_and_is_then_finished(
    config_for, held_out, tmp_path, monkeypatch
):
    give_held_out_losses(monkeypatch, best_at(6))
    options = {
        "max_steps": 200,
        "eval_steps": 3,
        "eval_text": str(held_out),
        "early_stopping_patience": 2,
        "save_steps": 50,
    }
    result = train(config_for(**options))
    assert result.steps == 6 + 2 * 3 and result.best_step is None
    assert last_checkpoint(tmp_path / "out").name == "checkpoint-12"
    weights = (tmp_path / "out" / "model.safetensors").read_bytes()
    again = train(config_for(resume_from_checkpoint=True, **options))
    assert (again.steps, again.tokens_per_second) == (result.steps, None), "it had ended"
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == weights
    assert (
        train(config_for(resume_from_checkpoint=True, **{**options, "early_stopping_patience": 3})).steps == 6 + 3 * 3
    )


def test_the_first_text_decides_which_model_is_best_and_when_to_stop(config_for, texts, tmp_path, monkeypatch, capsys):
    give_held_out_losses(monkeypatch, best_at(6), best_at(200))
    options = {
        "max_steps": 200,
        "eval_steps": 3,
        "eval_text": texts,
        "early_stopping_patience": 2,
        "load_best_model_at_end": True,
    }
    result = train(config_for(**options))
    assert result.best_step == 6 and result.steps == 6 + 2 * 3
    assert "best: held-out perplexity of near " in capsys.readouterr().err
    card = (tmp_path / "out" / "README.md").read_text()
    assert "The weights are those after step 6, where the held-out text near was predicted best." in card


def test_an_interrupted_run_measures_as_the_uninterrupted_one_and_keeps_its_texts(config_for, corpus, texts, tmp_path):
    options = {
        "max_steps": 12,
        "eval_text": texts,
        "eval_steps": 3,
        "load_best_model_at_end": True,
        "early_stopping_patience": 9,
    }
    train(config_for("whole", **options))
    interrupted(prepare(config_for("parts", **options)), 7)
    for others in ({"near": texts["near"]}, {**texts, "more": str(corpus)}, texts["near"]):
        with refused(r"eval_text is .*, but the run to resume has \{'near': "):
            check_output(config_for("parts", resume_from_checkpoint=True, **{**options, "eval_text": others}))
    train(config_for("parts", resume_from_checkpoint=True, **options))
    assert list(by_step(tmp_path / "parts", "eval_wiki-2_loss")) == [0, 3, 6, 9, 12]
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_the_order_may_change_when_a_run_is_resumed_and_then_another_text_decides(config_for, texts, tmp_path):
    options = {"max_steps": 4, "save_steps": 2, "eval_steps": 2}
    train(config_for(eval_text=texts, **options))
    turned = dict(reversed(texts.items()))
    config = config_for(eval_text=turned, resume_from_checkpoint=True, **options)
    assert check_output(config) == tmp_path / "out" / "checkpoint-4"
    log = [{"step": 2, "eval_near_loss": 1.0, "eval_wiki-2_loss": 2.0}]
    assert (held_out_losses(log, texts), held_out_losses(log, turned)) == ({2: 1.0}, {2: 2.0})


def test_room_is_made_for_the_best_checkpoint(config_for, held_out):
    options = {"eval_text": str(held_out), "eval_steps": 2, "save_total_limit": 1, "save_steps": 5}
    rooms = [prepare(config_for(str(best), load_best_model_at_end=best, **options)).room for best in (False, True)]
    assert [(room.written, room.kept) for room in rooms] == [(2, 1), (3, 2)]


@pytest.mark.parametrize(
    ("eval_text", "changes", "message"),
    [
        ("/absent", {}, "text is '/absent', which does not exist"),
        ("short", {}, "which cannot be measured: the text has 4 tokens to predict; expected at least"),
        (
            "texts",
            {"eval_max_tokens": 5},
            "max_tokens is 5; expected at least one window of 128 tokens, or a smaller sequence_length.",
        ),
        ("out/held", {}, "which holds the eval_text '"),
        ({"a": "texts", "s": "short"}, {}, "/short', which cannot be measured: the text has 4 tokens"),
        ({"a": "texts", "s": "out/held"}, {}, "which holds the eval_text.s '"),
        (
            {"a": "texts", "b": "texts/../texts"},
            {},
            "texts' twice, as 'a' and as 'b'; expected texts that differ. Leave",
        ),
    ],
)
def test_held_out_text_is_checked_at_the_start(eval_text, changes, message, config_for, held_out, tmp_path):
    (tmp_path / "short").write_text("w5 w6 w7 w8 w9")
    shutil.copytree(held_out, tmp_path / "texts")
    (tmp_path / "out" / "held").mkdir(parents=True)
    output = "out" if "out/held" in str(eval_text) else "new"
    if isinstance(eval_text, dict):
        texts = {name: f"{tmp_path}/{path}" for name, path in eval_text.items()}
    else:
        texts = str(tmp_path / eval_text)
    with refused(re.escape(message)) as refusal:
        train(config_for(output, overwrite_output_dir=True, eval_text=texts, **changes))
    assert ("eval_text.s is '" in str(refusal.value)) == ("/short'" in message)
    assert not (tmp_path / "new").exists() and not any((tmp_path / "out" / "held").iterdir())


def test_the_best_step_is_the_first_of_the_smallest_loss():
    assert best_step({}) is None and not is_stopped_early({}, 1)
    losses = {3: 2.0, 6: 1.0, 9: 1.0, 12: 1.5}
    assert best_step(losses) == 6
    assert [is_stopped_early(losses, patience) for patience in (None, 1, 2, 3)] == [False, True, True, False]


def test_words_name_texts_beside_those_of_the_file(tmp_path):
    path = tmp_path / "train.yaml"
    path.write_text("model_name_or_path: m\noutput_dir: o\ncorpus: c\neval_text: {a: x.txt}\n")
    assert read_config(TrainConfig, path, ["eval_text.b-2=y.txt"]).eval_text == {"a": "x.txt", "b-2": "y.txt"}
    assert read_config(TrainConfig, path, ["eval_text=y.txt"]).eval_text == "y.txt"
    assert read_config(TrainConfig, path, ["eval_text=null", "eval_text.b=y.txt"]).eval_text == {"b": "y.txt"}
    with refused(r"override is 'eval_text\.b\.c=y\.txt', but 'b' has no keys of its own\."):
        read_config(TrainConfig, path, ["eval_text.b=y.txt", "eval_text.b.c=y.txt"])
    with refused(r"'eval_text' is 'x\.txt', which has no name; give all of it, as eval_text=\{\.\.\.\}\."):
        read_config(TrainConfig, path, ["eval_text=x.txt", "eval_text.b=y.txt"])


LETTERS = "expected letters, digits, '-' and '_', since the log has an entry eval_NAME_loss. "


@pytest.mark.parametrize(
    ("eval_text", "message"),
    [
        ({}, "eval_text is {}; expected a name and a path at least, as in {wiki: wiki.txt}, or a path alone."),
        ({"two words": "x"}, f"eval_text names a text 'two words'; {LETTERS}"),
        ({"": "x"}, f"eval_text names a text ''; {LETTERS}"),
        ({2020: "x"}, f"eval_text names a text 2020; {LETTERS}Rename the text, or put a number in quotes."),
        ({"a": 3}, "eval_text.a is 3; expected a string."),
        (3, "eval_text is 3; expected a string or a mapping, each value of it a string or null."),
    ],
    ids=["empty", "space", "no-name", "number", "no-path", "neither"],
)
def test_texts_have_names_and_paths(eval_text, message):
    with refused(re.escape(message)):
        from_mapping(TrainConfig, {**NEEDED, "eval_text": eval_text})


def test_texts_of_one_label_are_told_of_in_the_card_all_the_same():
    config = from_mapping(TrainConfig, {**NEEDED, "eval_text": {"a": "x/held.txt", "b": "y/held.txt"}})
    assert config.to_share(lambda path: path.rpartition("/")[2]).eval_text == {"a": "held.txt", "b": "held.txt"}
    assert b"a: x/held.txt" in add_training(b"card", config, 1, 1, None)


def test_perplexities_of_many_texts_stand_below_the_row_in_80_columns(capsys):
    names = [f"text-{number:02}" for number in range(9)]
    table = ProgressTable(names, TrainingClock(None, int, False))
    state = TrainerState(max_steps=100)
    table.on_train_begin(None, state, TrainerControl())
    state.global_step = 50
    table.on_log(None, state, TrainerControl(), logs={f"eval_{name}_perplexity": 12345.67891 for name in names})
    header, row, *below = capsys.readouterr().out.splitlines()
    assert "perplexity" not in header and row.split() == ["50"]
    assert len(below) == 3 and all(len(line) <= 80 for line in below)
    listed = ", ".join(f"{name} 12345.6789" for name in names)
    assert " ".join(" ".join(below).split()) == f"perplexity of {listed}"


def test_a_text_alone_that_fetches_nothing_needs_no_line_at_the_start(config_for, held_out):
    run = prepare(config_for(eval_text=str(held_out)))
    assert list(run.trainer.held_out.texts) == [""] and describe_held_out(run.trainer.held_out.texts) == []

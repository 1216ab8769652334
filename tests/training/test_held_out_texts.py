"""Several held-out texts are measured at the same moments, each as if it were the only one, and the first decides."""

import dataclasses
import re
from pathlib import Path

import pytest
from training.test_held_out import same_weights
from training.test_interruption import interrupted
from training.test_run import exact_log
from training.tiny_run import best_at, give_held_out_losses, tiny_config, write_corpus
from transformers import TrainerControl, TrainerState

from midus_hf.config.yaml_options import from_mapping, read_config
from midus_hf.evaluation.evaluate import evaluate
from midus_hf.evaluation.settings import EvaluationSettings
from midus_hf.training.data.held_out import describe_held_out, held_out_losses
from midus_hf.training.options import TrainConfig
from midus_hf.training.output.model_card import add_training
from midus_hf.training.output.output_folder import check_output
from midus_hf.training.run.progress import ProgressTable
from midus_hf.training.run.train import prepare, train
from midus_hf.training.run.training_log import read_log

NEEDED = {"model": "m", "output": "o", "corpus": "c"}


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("held_out")
    lengths = {"near": 100, "wiki-2": 150}
    return {name: str(write_corpus(folder / name, documents=3, length=length)) for name, length in lengths.items()}


def measured(output: Path, name: str) -> dict[int, float]:
    return {event["step"]: event[name] for event in read_log(output / "log.jsonl") if name in event}


def test_each_is_measured_as_the_evaluation_command_measures_it(upscaled, corpus, texts, tmp_path, capsys):
    output, model = tmp_path / "out", upscaled("llama")
    train(tiny_config(model, corpus, output, max_steps=6, eval_text=texts, eval_every=4, trainable="all"))
    events = [event for event in read_log(output / "log.jsonl") if "eval_near_loss" in event]
    assert [event["step"] for event in events] == [0, 4, 6]
    assert all("eval_wiki-2_loss" in event and "eval_loss" not in event for event in events)
    for name, path in texts.items():
        settings = EvaluationSettings(text=path, device="cpu")
        before, after = (
            report["perplexity"]["perplexity"] for report in evaluate([str(model), str(output)], settings)["models"]
        )
        scores = measured(output, f"eval_{name}_perplexity")
        assert (scores[0], scores[6]) == (pytest.approx(before, rel=1e-6), pytest.approx(after, rel=1e-6))
        assert scores[6] != pytest.approx(scores[0], rel=1e-3)
    said = capsys.readouterr().out
    assert "held-out text near: 299 tokens to predict" in said
    assert "held-out text wiki-2: 449 tokens to predict" in said
    told = f"perplexity of near {events[0]['eval_near_perplexity']:.4f}, wiki-2 {events[0]['eval_wiki-2_perplexity']:.4f}\n"
    assert told in said
    card = (output / "README.md").read_text()
    assert "eval_text:\n  near: near\n  wiki-2: wiki-2\n" in card


def test_a_text_has_the_losses_that_it_has_alone(upscaled, corpus, texts, tmp_path):
    options = {"max_steps": 4, "eval_every": 2}
    train(tiny_config(upscaled("llama"), corpus, tmp_path / "one", eval_text=texts["wiki-2"], **options))
    train(tiny_config(upscaled("llama"), corpus, tmp_path / "both", eval_text=texts, **options))
    assert measured(tmp_path / "one", "eval_loss") == measured(tmp_path / "both", "eval_wiki-2_loss")
    assert exact_log(tmp_path / "one") == exact_log(tmp_path / "both")
    assert same_weights(tmp_path / "one", tmp_path / "both")


def test_the_first_text_decides_which_model_is_best_and_when_to_stop(
    upscaled, corpus, texts, tmp_path, monkeypatch, capsys
):
    give_held_out_losses(monkeypatch, best_at(6), best_at(200))
    options = {"max_steps": 200, "eval_every": 3, "eval_text": texts, "early_stop": 2, "keep_best": True}
    result = train(tiny_config(upscaled("llama"), corpus, tmp_path / "out", **options))
    assert result.best_step == 6 and result.steps == 6 + 2 * 3
    assert "best: held-out perplexity of near " in capsys.readouterr().err
    card = (tmp_path / "out" / "README.md").read_text()
    assert "The weights are those after step 6, where the held-out text near was predicted best." in card


def test_a_resumed_run_measures_as_the_uninterrupted_one_and_keeps_its_texts(upscaled, corpus, texts, tmp_path):
    options = {"max_steps": 6, "eval_every": 3, "eval_text": texts}
    train(tiny_config(upscaled("llama"), corpus, tmp_path / "whole", **options))
    interrupted(tiny_config(upscaled("llama"), corpus, tmp_path / "parts", **options), 4)
    for others in ({"near": texts["near"]}, {**texts, "more": str(corpus)}, texts["near"], None):
        changed = {**options, "eval_text": others, "eval_every": 3 if others else None}
        with pytest.raises(ValueError, match=r"eval_text is .*, but the run to resume has \{'near': "):
            check_output(tiny_config(upscaled("llama"), corpus, tmp_path / "parts", resume=True, **changed))
    train(tiny_config(upscaled("llama"), corpus, tmp_path / "parts", resume=True, **options))
    for name in texts:
        assert measured(tmp_path / "parts", f"eval_{name}_loss") == measured(tmp_path / "whole", f"eval_{name}_loss")
        assert list(measured(tmp_path / "parts", f"eval_{name}_loss")) == [0, 3, 6]


def test_the_order_may_change_when_a_run_is_resumed_and_then_another_text_decides(upscaled, corpus, texts, tmp_path):
    options = {"max_steps": 4, "save_every": 2, "eval_every": 2}
    train(tiny_config(upscaled("llama"), corpus, tmp_path / "out", eval_text=texts, **options))
    turned = dict(reversed(texts.items()))
    config = tiny_config(upscaled("llama"), corpus, tmp_path / "out", eval_text=turned, resume=True, **options)
    assert check_output(config) == tmp_path / "out" / "checkpoint-4"
    log = [{"step": 2, "eval_near_loss": 1.0, "eval_wiki-2_loss": 2.0}]
    assert (held_out_losses(log, texts), held_out_losses(log, turned)) == ({2: 1.0}, {2: 2.0})


def test_words_name_texts_beside_those_of_the_file(tmp_path):
    path = tmp_path / "train.yaml"
    path.write_text("model: m\noutput: o\ncorpus: c\neval_text: {a: x.txt}\n")
    assert read_config(TrainConfig, path, ["eval_text.b-2=y.txt"]).eval_text == {"a": "x.txt", "b-2": "y.txt"}
    assert read_config(TrainConfig, path, ["eval_text=y.txt"]).eval_text == "y.txt"
    assert read_config(TrainConfig, path, ["eval_text=null", "eval_text.b=y.txt"]).eval_text == {"b": "y.txt"}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "eval_text.b=y.txt",
            "override is 'eval_text.b=y.txt', but 'eval_text' is 'x.txt', which has no name; give all of it, as eval_text={...}.",
        ),
        ("eval_text.b.c=y.txt", "override is 'eval_text.b.c=y.txt', but 'b' has no keys of its own."),
    ],
)
def test_a_text_without_a_name_stays_alone(word, message, tmp_path):
    path = tmp_path / "train.yaml"
    path.write_text("model: m\noutput: o\ncorpus: c\n" + ("eval_text: x.txt\n" if word.count(".") == 2 else ""))
    with pytest.raises(ValueError, match=re.escape(message)):
        read_config(TrainConfig, path, [word])


@pytest.mark.parametrize(
    ("eval_text", "message"),
    [
        ({}, "eval_text is {}; expected a name and a path at least, as in {wiki: wiki.txt}, or a path alone."),
        (
            {"two words": "x"},
            "eval_text names a text 'two words'; expected letters, digits, '-' and '_', since the log has",
        ),
        ({"": "x"}, "eval_text names a text ''; expected letters"),
        (
            {2020: "x"},
            "eval_text names a text 2020; expected letters, digits, '-' and '_', since the log has eval_NAME_loss of it. "
            "Rename it, or put a number in quotes.",
        ),
        ({"a": 3}, "eval_text.a is 3; expected a string."),
        (3, "eval_text is 3; expected a string or a mapping, each value of it a string or null."),
    ],
    ids=["empty", "space", "no-name", "number", "no-path", "neither"],
)
def test_texts_have_names_and_paths(eval_text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        from_mapping(TrainConfig, {**NEEDED, "eval_text": eval_text})


def test_a_text_that_cannot_be_measured_is_named(upscaled, corpus, texts, tmp_path):
    (tmp_path / "short").write_text("w5 w6 w7 w8 w9")
    config = tiny_config(
        upscaled("llama"), corpus, tmp_path / "out", eval_text={**texts, "s": str(tmp_path / "short")}
    )
    with pytest.raises(
        ValueError, match=r"eval_text\.s is '.*short', which cannot be measured: the text has 4 tokens"
    ):
        train(config)
    config = dataclasses.replace(
        config, output=str(tmp_path), overwrite=True, eval_text={"s": str(tmp_path / "short")}
    )
    with pytest.raises(ValueError, match=r"which holds the eval_text\.s '"):
        train(config)
    assert not (tmp_path / "out").exists()


def test_a_path_may_be_there_once(upscaled, corpus, texts, tmp_path):
    again = str(Path(texts["near"], "..", "near"))
    config = tiny_config(upscaled("llama"), corpus, tmp_path / "out", eval_text={**texts, "again": again})
    message = f"eval_text has {again!r} twice, as 'near' and as 'again'; expected texts that differ. Leave one out."
    with pytest.raises(ValueError, match=re.escape(message)):
        prepare(config)


def test_texts_of_one_label_are_told_of_in_the_card_all_the_same(tmp_path):
    config = from_mapping(TrainConfig, {**NEEDED, "eval_text": {"a": "x/held.txt", "b": "y/held.txt"}})
    assert config.to_share(lambda path: path.rpartition("/")[2]).eval_text == {"a": "held.txt", "b": "held.txt"}
    assert b"a: x/held.txt" in add_training(b"card", config, 1, 1, None)


def test_perplexities_of_many_texts_stand_below_the_row_in_80_columns(capsys):
    names = [f"text-{number:02}" for number in range(9)]
    table = ProgressTable(names)
    state = TrainerState(max_steps=100)
    table.on_train_begin(None, state, TrainerControl())
    state.global_step = 50
    table.on_log(None, state, TrainerControl(), logs={f"eval_{name}_perplexity": 12345.67891 for name in names})
    header, row, *below = capsys.readouterr().out.splitlines()
    assert "perplexity" not in header and row.split() == ["50"]
    assert len(below) == 3 and all(len(line) <= 80 for line in below)
    listed = ", ".join(f"{name} 12345.6789" for name in names)
    assert " ".join(" ".join(below).split()) == f"perplexity of {listed}"


def test_a_text_alone_that_fetches_nothing_needs_no_line_at_the_start(upscaled, corpus, texts, tmp_path):
    run = prepare(tiny_config(upscaled("llama"), corpus, tmp_path / "out", eval_text=texts["near"]))
    assert list(run.trainer.held_out.texts) == [""] and describe_held_out(run.trainer.held_out.texts) == []

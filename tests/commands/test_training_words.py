"""`midus train TEXTS --model M --output O`: keys for a short run, and flags over those of a recipe."""

import json

import pytest

from midus_hf.cli.run_arguments import read_arguments
from midus_hf.training.arguments import TrainArguments
from midus_hf.training.sft import SftArguments


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"upscale": {"trainable": "new"}}))
    return str(tmp_path / "model")


def read(*words, kind=TrainArguments):
    return read_arguments(kind, words)


def test_texts_get_keys_for_a_short_run_which_a_line_names(model, tmp_path, capsys):
    arguments = read("notes", "--model", model, "--output", str(tmp_path / "out"))
    assert (arguments.corpus, arguments.model_name_or_path) == ("notes", model)
    assert (arguments.sequence_length, arguments.num_train_epochs, arguments.learning_rate) == (256, None, 1e-3)
    assert capsys.readouterr().err == (
        "for a short run: sequence_length=256, num_train_epochs=3 (more for fewer than 100 steps), "
        "per_device_train_batch_size=4, logging_steps=0.05, learning_rate=0.001, value_learning_rate=0.01\n"
    )


@pytest.mark.parametrize(("trainable", "rate"), [("auto", 1e-3), ("new", 1e-3), ("[value]", 1e-3), ("all", 1e-4)])
def test_what_trains_decides_the_rate(trainable, rate, model, capsys):
    words = ["--model_name_or_path", model, "--output_dir", "o", "--trainable", trainable]
    assert read("notes", *words).learning_rate == rate and f"learning_rate={rate:g}" in capsys.readouterr().err
    whole = ["--corpus", "notes", "--model", "m", "--output", "o"]
    assert read(*whole, "--bf16", "false").learning_rate == 1e-4
    assert read(*whole, "--adapters", '{"r": 4}').learning_rate == 1e-3


def test_flags_replace_the_keys_of_a_short_run(model, capsys):
    words = ["--model", model, "--output", "o", "--learning_rate", "0.5", "--max_steps", "7", "--sequence_length", "8"]
    arguments = read("notes", *words)
    assert (arguments.learning_rate, arguments.max_steps, arguments.sequence_length) == (0.5, 7, 8)
    assert " learning_rate=" not in capsys.readouterr().err
    for flag in ("--num_train_epochs=2", "--max_steps=7"):
        assert read("notes", flag, *words[:4]).num_train_epochs is not None
        assert "num_train_epochs" not in capsys.readouterr().err


def test_steps_of_a_recipe_count_before_epochs_which_a_line_says(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{corpus: c, model_name_or_path: m, output_dir: o, max_steps: 3}")
    arguments = read(str(recipe), "--num_train_epochs", "2", "--model", "other: one", "--output", "p")
    assert (arguments.model_name_or_path, arguments.output_dir, arguments.max_steps) == ("other: one", "p", 3)
    line = "max_steps=3 overrides num_train_epochs; pass --max_steps -1 to use epochs\n"
    assert capsys.readouterr().err == line
    arguments = read(str(recipe), "--num_train_epochs", "2", "--max_steps", "-1")
    assert (arguments.max_steps, arguments.num_train_epochs, capsys.readouterr().err) == (-1, 2, "")


def test_chats_are_fine_tuned_on_likewise(model):
    arguments = read("chats.jsonl", "--model", model, "--output", "o", kind=SftArguments)
    assert (arguments.dataset_name, arguments.max_length, arguments.learning_rate) == ("chats.jsonl", 256, 1e-3)

"""`midus train TEXTS --model M --output O`: keys for a short run, and what is said to a first word that is something else."""

import json

import pytest
from commands.installed import run_in_process

from midus_hf.cli.training.command import read_arguments
from midus_hf.training.arguments import TrainArguments
from midus_hf.training.sft.arguments import SftArguments
from tests.training.tiny_run import save_upscaled, write_corpus


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"upscale": {"trainable": "new"}}))
    return str(tmp_path / "model")


def read(first, *overrides, command="train", kind=TrainArguments, **options):
    return read_arguments(kind, command, first, overrides, **options)


def test_texts_get_keys_for_a_short_run_which_a_line_names(model, tmp_path, capsys):
    arguments = read("notes", model=model, output=str(tmp_path / "out"))
    assert (arguments.corpus, arguments.model_name_or_path) == ("notes", model)
    assert (arguments.sequence_length, arguments.num_train_epochs, arguments.learning_rate) == (256, 3, 1e-3)
    assert arguments.least_steps == 100
    assert capsys.readouterr().err == (
        "for a short run: sequence_length=256, num_train_epochs=3 (more for fewer than 100 steps), "
        "per_device_train_batch_size=4, logging_steps=0.05, learning_rate=0.001, value_learning_rate=0.01; KEY=VALUE behind the "
        "texts replaces any\n"
    )


def test_a_whole_model_trains_more_slowly_and_adapters_do_not(tmp_path):
    assert read("notes", "bf16=false", model="m", output=str(tmp_path)).learning_rate == 1e-4
    assert read("notes", "adapters={r: 4}", model="m", output=str(tmp_path)).learning_rate == 1e-3


@pytest.mark.parametrize(
    ("word", "rate"),
    [("trainable=auto", 1e-3), ("trainable=new", 1e-3), ("trainable=[value]", 1e-3), ("trainable=all", 1e-4)],
)
def test_a_word_for_the_model_or_for_what_trains_decides_the_rate(word, rate, model, capsys):
    assert read("notes", f"model_name_or_path={model}", word, output="o").learning_rate == rate
    assert f"learning_rate={rate:g}" in capsys.readouterr().err


def test_keys_of_a_later_recipe_are_no_keys_that_were_chosen(model, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{corpus: c, model_name_or_path: m, learning_rate: 0.5, sequence_length: 8, max_steps: 7}")
    arguments = read("notes", str(recipe), model=model, output="o")
    assert (arguments.corpus, arguments.model_name_or_path, arguments.learning_rate) == ("notes", model, 0.5)
    assert capsys.readouterr().err == (
        "for a short run: per_device_train_batch_size=4, logging_steps=0.05, value_learning_rate=0.01; KEY=VALUE behind the texts "
        "replaces any\n"
    )


@pytest.mark.parametrize("word", ["num_train_epochs=2", "max_steps=7"])
def test_a_length_that_is_given_stays(word, model, capsys):
    assert read("notes", word, model=model, output="o").least_steps == 0
    assert "num_train_epochs" not in capsys.readouterr().err


def test_words_replace_the_keys(model, capsys):
    words = ["learning_rate=0.5", "max_steps=7", f"model_name_or_path={model}", "output_dir=o", "sequence_length=8"]
    arguments = read("notes", *words)
    assert (arguments.learning_rate, arguments.max_steps, arguments.sequence_length) == (0.5, 7, 8)
    assert "learning_rate=0.5" not in capsys.readouterr().err


def test_the_options_replace_keys_of_a_recipe(tmp_path):
    (tmp_path / "recipe.yaml").write_text("{corpus: c, model_name_or_path: m, output_dir: o, max_steps: 3}")
    arguments = read(str(tmp_path / "recipe.yaml"), model="other: one", output="p")
    assert (arguments.model_name_or_path, arguments.output_dir, arguments.max_steps) == ("other: one", "p", 3)


def test_of_two_words_with_one_key_the_later_one_counts(model):
    assert read("notes", "seed=1", "seed=2", model=model, output="o").seed == 2


def test_steps_of_a_recipe_count_before_epochs_which_a_line_says(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{corpus: c, model_name_or_path: m, output_dir: o, max_steps: 3}")
    assert read(str(recipe), "num_train_epochs=2").max_steps == 3
    assert capsys.readouterr().err == "max_steps=3 counts, and not num_train_epochs; max_steps=-1 lets epochs count\n"
    arguments = read(str(recipe), "num_train_epochs=2", "max_steps=-1")
    assert (arguments.max_steps, arguments.num_train_epochs, capsys.readouterr().err) == (-1, 2, "")


def test_chats_are_fine_tuned_on_likewise(model, tmp_path):
    arguments = read("chats.jsonl", command="sft", kind=SftArguments, model=model, output=str(tmp_path / "out"))
    assert (arguments.dataset_name, arguments.max_length, arguments.learning_rate) == ("chats.jsonl", 256, 1e-3)


def test_a_folder_of_texts_trains_a_model(tmp_path, monkeypatch, capsys):
    model = save_upscaled("llama", tmp_path)
    corpus = write_corpus(tmp_path / "notes", documents=4, length=200)
    words = [str(corpus), "--model", str(model), "--output", str(tmp_path / "out"), "sequence_length=64"]
    words += ["num_train_epochs=3"]
    assert run_in_process("midus train", words, monkeypatch) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert "12 steps" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["notes"],
            "--model is missing: 'notes' is read as texts; run 'midus train notes --model MODEL --output DIR'",
        ),
        (["notes", "--model", "m"], "--output is missing: 'notes' is read as texts"),
        (["{model}"], "model' is a model, and texts are expected; run 'midus train TEXTS --model"),
        (["midus-hml"], "'midus-hml' is a recipe's name; run 'midus train --print-config midus-hml > recipe.yaml'"),
        (
            ["llama-pro"],
            "'llama-pro' is a method, by which 'upscale --method llama-pro' makes a model; then run 'midus",
        ),
        (["corpus=notes"], "'corpus=notes' stands first; expected a recipe or texts before it: 'midus train TEXTS"),
        (
            ["notes", "lr=1e-4", "--model", "m", "--output", "o"],
            "config has no option 'lr'. Did you mean 'learning_rate' or",
        ),
        (
            ["notes", "corpus=other"],
            "corpus is given twice, by 'notes' and 'corpus=other'; expected each key once. Leave",
        ),
        (
            ["notes", "--model", "m", "model_name_or_path=n"],
            "model_name_or_path is given twice, by --model and 'model_name_or_path=n'; expected each key once.",
        ),
        (["a.yaml", "--output", "o", "output_dir=p"], "output_dir is given twice, by --output and 'output_dir=p'"),
        (["absent.yaml"], "config is 'absent.yaml', which cannot be read"),
        (["nowhere/x.txt", "--model", "{model}", "--output", "o"], "corpus is 'nowhere/x.txt', which does not exist"),
    ],
)
def test_what_stands_first_is_told_with_what_takes_it(words, message, model, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert run_in_process("midus train", [word.replace("{model}", model) for word in words], monkeypatch) == 2
    assert message in capsys.readouterr().err

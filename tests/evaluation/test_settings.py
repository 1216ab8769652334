"""What an evaluation may be told, and the recipes in configs/eval."""

from pathlib import Path

import pytest

from midus_hf.evaluation.settings import EvaluationSettings, read_settings

RECIPES = sorted((Path(__file__).parents[2] / "configs" / "eval").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_read(recipe):
    settings = read_settings(recipe, {"text": "text.txt"})
    assert settings.tasks
    assert settings.text == "text.txt"


@pytest.mark.parametrize("recipe", ["general", "local"])
def test_suites_are_zero_shot(recipe):
    settings = read_settings(next(path for path in RECIPES if path.stem == recipe), {})
    assert settings.num_fewshot == 0


def test_what_is_given_beside_a_file_wins(tmp_path):
    (tmp_path / "a.yaml").write_text("tasks: [piqa]\nlimit: 5\nbatch_size: 2\n")
    settings = read_settings(tmp_path / "a.yaml", {"limit": 7, "batch_size": None})
    assert settings == EvaluationSettings(tasks=["piqa"], limit=7, batch_size=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task: [piqa]", r"config has no option 'task'\. Did you mean 'tasks'"),
        ("tasks: piqa", r"tasks is 'piqa'; expected a list, each item of it a string"),
        ("text: a\nstride: 1.5", r"stride is 1\.5; expected a whole number or null"),
        ("text: a\ntrust_remote_code: 1", r"trust_remote_code is 1; expected true or false"),
        ("- piqa", r"a\.yaml' holds a list; expected a mapping of keys to values"),
        ("", "there is nothing to measure"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, text, message):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_settings(tmp_path / "a.yaml", {})


def test_null_and_text_that_is_a_number_are_read_as_everywhere(tmp_path):
    (tmp_path / "a.yaml").write_text("text: a\nmax_tokens: 1e5\nstride: null\n")
    assert read_settings(tmp_path / "a.yaml", {}) == EvaluationSettings(text="a", max_tokens=100_000)


BY_TREE = {"text": "a", "retriever": "tree"}
BESIDE = {"documents": "d", "embedding_model": "m"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "there is nothing to measure; give a text, tasks, or both"),
        ({"text": "t", "answers": "a.jsonl"}, "answers is a.jsonl, but there are no tasks; name them"),
        ({"tasks": ["piqa"], "stride": 4}, "stride is 4, but there is no text to measure"),
        ({"tasks": ["piqa"], "max_tokens": 4}, "max_tokens is 4, but there is no text to measure"),
        ({"tasks": ["piqa"], "column": "body"}, "column is 'body', but there is no text to measure"),
        ({"tasks": ["piqa"], "encoding": "latin-1"}, "encoding is 'latin-1', but there is no text to measure"),
        ({"text": "a", "limit": 4}, "limit is 4, but there are no tasks; name them"),
        ({"text": "a", "data": "d"}, "data is d, but there are no tasks; name them"),
        ({"tasks": ["piqa"], "limit": 0}, "limit is 0; expected at least 1"),
        ({"text": "a", "batch_size": 0}, "batch_size is 0; expected at least 1"),
        ({"tasks": ["piqa"], "num_fewshot": -1}, "num_fewshot is -1; expected at least 0"),
        ({"text": "a", "seed": -1}, "seed is -1; expected at least 0"),
        ({"text": "a", "dtype": "int8"}, "dtype is 'int8'; expected auto, float32, bfloat16 or float16"),
        ({"text": "a", "blocked": ["1:0"]}, "blocked is 1:0, but there is no retriever; give one"),
        ({**BY_TREE, "blocked": ["0:1"]}, "blocked has '0:1'; expected LEVEL:NODE, such as 2:52"),
        ({"text": "a", "block_best": "1:1"}, "block_best is 1:1, but there is no retriever; give one"),
        ({**BY_TREE, "block_best": "0:1"}, "block_best is '0:1'; expected LEVEL:COUNT, such as 1:1"),
        ({**BY_TREE, "path_column": "i"}, "path_column is 'i', but a retriever is given; expected one of them."),
        ({"tasks": ["piqa"], "path_column": "i"}, "path_column is 'i', but there is no text to measure."),
        (
            {"tasks": ["facts"], "documents": "d"},
            "documents is d, but no model decides which of them is nearest; give",
        ),
        ({"tasks": ["facts"], "passage_tokens": 3}, "passage_tokens is 3, but there are no documents; give some."),
        ({"tasks": ["facts"], "embedding_model": "m"}, "embedding_model is m, but there are no documents; give some."),
        ({**BESIDE, "tasks": ["facts"], "passage_tokens": 0}, "passage_tokens is 0; expected at least 1."),
        ({**BESIDE, "text": "t"}, "documents is d, but there are no tasks; name them."),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        EvaluationSettings(**options)

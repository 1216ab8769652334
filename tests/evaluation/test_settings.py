"""What an evaluation may be told, and the recipes in configs/eval."""

from pathlib import Path

import pytest
from training.tiny_run import refused

from midus_hf.config.yaml_options import from_mapping, read_config, read_mapping
from midus_hf.evaluation.settings import EvaluationSettings

RECIPES = sorted((Path(__file__).parents[2] / "configs" / "eval").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_read(recipe):
    settings = from_mapping(EvaluationSettings, {**read_mapping(recipe), "text": "text.txt"})
    assert settings.tasks
    assert settings.text == "text.txt"


@pytest.mark.parametrize("recipe", ["general", "local"])
def test_suites_are_zero_shot(recipe):
    settings = read_config(EvaluationSettings, [path for path in RECIPES if path.stem == recipe])
    assert settings.num_fewshot == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "there is nothing to measure; give a text, tasks, or both"),
        ({"tasks": ["piqa"], "max_tokens": 4}, "max_tokens is 4, but there is no text to measure; give one, or leave it"),
        ({"tasks": ["piqa"], "column": "body"}, "column is 'body', but there is no text to measure"),
        ({"text": "a", "limit": 4}, "limit is 4, but there is no task to run; give one, or leave it out"),
        ({"text": "a", "data": "d"}, "data is 'd', but there is no task to run"),
        ({"tasks": ["piqa"], "limit": 0}, "limit is 0; expected at least 1"),
        ({"text": "a", "batch_size": 0}, "batch_size is 0; expected at least 1"),
        ({"tasks": ["piqa"], "num_fewshot": -1}, "num_fewshot is -1; expected at least 0"),
        (
            {"text": "a", "retriever": "tree", "path_column": "i"},
            "path_column is 'i', but a retriever is given; expected one of them.",
        ),
        ({"tasks": ["piqa"], "path_column": "i"}, "path_column is 'i', but there is no text to measure"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(options, message):
    with refused(message):
        EvaluationSettings(**options)

"""Comparisons that ship are ones that run: their keys are known, and what variants add is of the size that it is said to be."""

import shutil
from pathlib import Path

import pytest
import yaml
from compare.small_comparison import write_room
from evaluation.questions import write_questions

from benchmarks.models.points import CONFIGS
from midus_hf.compare.checking import check
from midus_hf.compare.options import Comparison
from midus_hf.compare.variants import plan
from midus_hf.config.yaml_options import read_config

RECIPES = sorted((Path(__file__).parents[2] / "configs" / "compare").glob("*.yaml"))
assert RECIPES


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_comparison_that_ships_is_planned_on_its_base(recipe, tmp_path):
    room = write_room(tmp_path)
    (tmp_path / "sized").mkdir()
    shutil.copyfile(CONFIGS / "smollm2-135m.json", tmp_path / "sized" / "config.json")
    words = [f"base={tmp_path / 'sized'}", f"output_dir={tmp_path / 'out'}", f"train.corpus={room / 'corpus'}"]
    given = yaml.safe_load(recipe.read_text())
    words += [f"domain.{name}={room / 'plants.txt'}" for name in given["domain"]]
    words += [f"retention.{name}={room / 'stars.txt'}" for name in given["retention"]]
    if "tasks" in given:
        words.append(f"tasks.data={write_questions(tmp_path / 'questions')}")
    comparison, variants = plan(read_config(Comparison, recipe, words))
    check(comparison, variants)
    assert comparison.seeds and [variant.name for variant in variants] == list(comparison.variants)
    budget = comparison.trained_parameters
    assert budget or not any(variant.fitted for variant in variants)
    for variant in variants:
        if budget and variant.upscale is not None:
            assert variant.trained_parameters == pytest.approx(budget, rel=0.3), variant.name

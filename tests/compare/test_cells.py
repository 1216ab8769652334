"""What a run of a comparison is called, what it is asked for, and what of that has changed."""

import dataclasses
from functools import partial
from pathlib import Path

import pytest
from compare import made_results

from midus_hf.compare.arms import Arm
from midus_hf.compare.cells import Cell, cells_of, changed_keys
from midus_hf.compare.rates import rate_name
from midus_hf.config.yaml_options import from_mapping
from midus_hf.training.options import TrainConfig

ARM = Arm("hml", {"method": "midus-hml"}, {"corpus": "corpus", "max_steps": 10}, [{}], True)


comparison = partial(made_results.comparison, ["hml"], evaluations=2)


def keys(arm: Arm = ARM, rate=None, **changes):
    return Cell(arm, rate or {}, 3).training_keys(comparison(**changes), "model", Path("run"))


@pytest.mark.parametrize(
    ("rate", "name"),
    [
        ({}, "recipe"),
        ({"learning_rate": 1e-3}, "0.001"),
        ({"learning_rate": 3e-5}, "3e-05"),
        ({"learning_rate": 1}, "1"),
        ({"learning_rate": 1e-3, "value_learning_rate": 1e-2}, "0.001,value=0.01"),
        ({"key_value_learning_rate": 0.5, "weight_decay": 0.1}, "key_value=0.5,weight_decay=0.1"),
    ],
    ids=str,
)
def test_rates_have_short_names(rate, name):
    assert rate_name(rate) == name


def test_cells_are_told_seed_by_seed_and_are_folders_of_arm_rate_and_seed():
    arm = dataclasses.replace(ARM, rates=[{"learning_rate": 1e-3}, {"learning_rate": 1e-2}])
    names = [cell.name for cell in cells_of(arm, comparison(seeds=[4, 0]))]
    assert names == ["hml/0.001/seed-4", "hml/0.01/seed-4", "hml/0.001/seed-0", "hml/0.01/seed-0"]


def test_cells_that_differ_in_their_training_alone_share_an_upscaled_model():
    name = Cell(ARM, {}, 0).upscaled_name
    assert name is not None and name.startswith("hml-") and name.endswith("-seed-0")
    frozen = dataclasses.replace(
        ARM, name="hml+frozen-addresses", train={"trainable": ["value"]}, control="frozen-addresses", control_of="hml"
    )
    assert Cell(ARM, {"learning_rate": 1.0}, 0).upscaled_name == Cell(frozen, {}, 0).upscaled_name == name
    other = dataclasses.replace(ARM, upscale={"method": "midus-hml", "options": {"n": 1}})
    cells = [Cell(ARM, {}, 1), Cell(other, {}, 0), Cell(dataclasses.replace(ARM, name="b"), {}, 0)]
    assert len({name, *(cell.upscaled_name for cell in cells)}) == 4
    assert Cell(dataclasses.replace(ARM, upscale=None), {}, 0).upscaled_name is None
    one, same = ({"method": "midus-hml", "dtype": "float32"}, {"dtype": "float32", "method": "midus-hml"})
    names = [Cell(dataclasses.replace(ARM, upscale=keys), {}, 0).upscaled_name for keys in (one, same)]
    assert names[0] == names[1] != name, "keys in another order are the same keys"


def test_a_run_is_told_what_the_comparison_sets():
    told = keys()
    assert told == {
        "corpus": "corpus",
        "max_steps": 10,
        "eval_steps": 5,
        "save_steps": 5,
        "save_total_limit": 1,
        "model_name_or_path": "model",
        "output_dir": "run",
        "seed": 3,
        "eval_text": {"plants": "plants.txt", "stars": "stars.txt"},
    }
    assert from_mapping(TrainConfig, told).eval_steps == 5


@pytest.mark.parametrize(
    ("train", "changes", "every"),
    [
        ({"max_steps": 10}, {"evaluations": 3}, 3),
        ({"max_steps": 10}, {"evaluations": 20}, 1),
        ({"max_steps": "1e2"}, {"evaluations": 5}, 20),
        ({"max_steps": 100.0}, {"evaluations": 5}, 20),
        ({"max_steps": 10, "eval_steps": 4}, {}, 4),
        ({"max_steps": 10, "eval_steps": None}, {}, 5),
        ({"num_train_epochs": 1, "eval_steps": 4}, {}, 4),
        ({"max_steps": 10}, {"seconds": 9.0}, 5),
    ],
    ids=str,
)
def test_texts_are_measured_as_often_as_is_asked(train, changes, every):
    arm = dataclasses.replace(ARM, train={"corpus": "corpus", **train})
    assert from_mapping(TrainConfig, keys(arm, **changes)).eval_steps == every
    assert keys(arm, **changes).get("max_seconds") == changes.get("seconds")


def test_how_often_a_run_saves_and_how_many_checkpoints_stay_may_be_told():
    arm = dataclasses.replace(ARM, train={**ARM.train, "save_steps": 2, "save_total_limit": 7})
    assert (keys(arm)["save_steps"], keys(arm)["save_total_limit"]) == (2, 7)


def test_a_rate_wins_over_what_all_runs_are_told():
    arm = dataclasses.replace(ARM, train={**ARM.train, "learning_rate": 1.0})
    assert keys(arm)["learning_rate"] == 1.0 and keys(arm, {"learning_rate": 0.5})["learning_rate"] == 0.5


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        ({}, []),
        ({"base": "other"}, ["base"]),
        ({"retention": {}}, ["train.eval_text.stars"]),
        ({"domain": {"plants": "other.txt"}}, ["train.eval_text.plants"]),
        ({"evaluations": 1}, ["train.eval_steps", "train.save_steps"]),
        ({"seconds": 5.0}, ["train.max_seconds"]),
        ({"arm": {"upscale": {"method": "solar"}}}, ["upscale.method"]),
        ({"arm": {"upscale": {"method": "midus-hml", "options": {"n": 2}}}}, ["upscale.options"]),
        ({"arm": {"upscale": None}}, ["upscale"]),
        (
            {"arm": {"train": {"corpus": "other", "max_steps": 10, "per_device_train_batch_size": 2}}},
            ["train.corpus", "train.per_device_train_batch_size"],
        ),
        # What a result does not depend on.
        ({"output_dir": "elsewhere", "seeds": [3, 4], "keep_models": True, "trained_parameters": 7, "controls": False}, []),
        ({"arm": {"name": "b", "rates": [{}, {"learning_rate": 1.0}], "controls": False, "fitted": "n=2"}}, []),
    ],
    ids=str,
)  # fmt: skip
def test_what_has_changed_of_a_request_is_named(change, changed):
    arm = dataclasses.replace(ARM, **change.pop("arm", {}))
    before, now = Cell(ARM, {}, 3).request(comparison()), Cell(arm, {}, 3).request(comparison(**change))
    assert changed_keys(before, now) == changed


def test_what_is_no_mapping_any_more_has_changed_as_a_whole():
    assert changed_keys({"a": {"b": 1}}, {"a": [1]}) == ["a"]
    assert changed_keys([1], [2]) == ["all"] and changed_keys([1], [1]) == []

"""The log also goes to the trackers that the Trainer knows; one that is missing is named before anything else."""

import re

import pytest
from training.tiny_run import refused
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from midus_hf.config.yaml_options import from_mapping
from midus_hf.training.options import TrainConfig
from midus_hf.training.run import run_setup
from midus_hf.training.run.run_setup import check_reporting
from midus_hf.training.run.train import prepare

NEEDED = {"model_name_or_path": "m", "output_dir": "o", "corpus": "c"}


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(run_setup, "get_available_reporting_integrations", lambda: ["tensorboard", "wandb"])


def test_one_or_several_trackers_may_be_named(installed):
    assert from_mapping(TrainConfig, {**NEEDED, "report_to": "wandb"}).report_to == "wandb"
    assert from_mapping(TrainConfig, {**NEEDED, "report_to": ["wandb", "trackio"]}).report_to == ["wandb", "trackio"]
    for names in ("none", "wandb", ["none"], ["tensorboard", "wandb"], []):
        check_reporting(names)


@pytest.mark.parametrize(
    ("report_to", "message"),
    [
        ("trackio", "report_to is 'trackio', which is not installed; pip install trackio, or set report_to: none."),
        (["wandb", "mlflow"], "report_to is 'mlflow', which is not installed; pip install mlflow, or set"),
        ("wand", "report_to is 'wand'; expected none, or one or more of "),
        (["none", "wandb"], "report_to is ['none', 'wandb']; expected none, or one or more of "),
    ],
)
def test_what_is_unknown_or_missing_is_named(report_to, message, installed):
    with refused(re.escape(message)):
        check_reporting(report_to)


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
def test_the_trainer_knows_the_trackers_that_are_documented(name):
    assert name in INTEGRATION_TO_CALLBACK


def test_a_run_sees_to_its_trackers_first(config_for, installed):
    with refused("report_to is 'trackio', which is not installed"):
        prepare(config_for(report_to=["wandb", "trackio"]))

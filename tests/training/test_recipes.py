"""The recipes in `configs/train` are read, and say what the paper says."""

from pathlib import Path

import pytest

from midus_hf.config_file import read_config
from midus_hf.training import TrainConfig

RECIPES = Path(__file__).parents[2] / "configs" / "train"
GIVEN = {"model": "model=m", "output": "output=o", "corpus": "corpus=c"}
"""What a recipe may leave to the command line."""


def recipe(name: str) -> TrainConfig:
    path = RECIPES / f"{name}.yaml"
    stated = {line.partition(":")[0] for line in path.read_text(encoding="utf-8").splitlines()}
    return read_config(TrainConfig, path, [word for key, word in GIVEN.items() if key not in stated])


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_every_recipe_is_a_config(name):
    assert recipe(name).trainable == "new"


@pytest.mark.parametrize(
    ("name", "rate", "tokens"),
    [
        ("midus-hml-llama-3.2-1b", 1e-4, 1.5e9),
        ("midus-hml-llama-3.1-8b", 5e-5, 1.5e9),
        ("midus-hml-llama-3.2-1b-mathpile", 1e-4, 1.1e9),
        ("midus-hml-llama-3.1-8b-mathpile", 1e-4, 1.1e9),
    ],
)
def test_the_recipes_of_the_paper_have_its_hyperparameters(name, rate, tokens):
    config = recipe(name)
    assert (config.learning_rate, config.key_value_learning_rate) == (rate, None)
    assert (config.schedule, config.warmup_ratio, config.precision) == ("cosine", 0.1, "bf16")
    assert config.weight_decay in (0, 1e-6, 1e-2)
    assert config.batch_size * config.gradient_accumulation == 64
    assert config.sequence_length == 2048
    assert 0 <= tokens - config.max_steps * 64 * 2048 < 64 * 2048

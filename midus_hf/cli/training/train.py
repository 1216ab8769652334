"""The `midus train` command."""

from functools import partial
from typing import Annotated

from midus_hf.cli.command_line import command_line
from midus_hf.cli.options import argument
from midus_hf.cli.training.command import Overrides, run_training_command, train_in_group
from midus_hf.cli.training.printed_config import print_config_option


def _options() -> type:
    from midus_hf.training.options import TrainConfig

    return TrainConfig


_SOURCES = ("training/options.py", "training/run_options.py", "training/optim/rates.py")
app = command_line()


@app.command()
def midus_train(
    config: Annotated[str, argument("YAML file of keys; recipes are in configs/train.", "CONFIG")],
    overrides: Overrides = None,
    print_config: Annotated[str | None, print_config_option("train", _options, _SOURCES)] = None,
) -> None:
    """Train a model on text: an upscaled model, any other model, or a new one from random weights.

    An upscaled model trains the parameters that its method names, unless the recipe says otherwise. A printed recipe has
    every key with its default and meaning. A key that transformers.TrainingArguments has as well is named as there.

    \b
    midus train --print-config midus-hml > recipe.yaml
    midus train recipe.yaml model_name_or_path=UPSCALED corpus=TEXTS
    """
    train_in_group(_options(), "midus_hf.training.run.train", config, overrides or [])


main = partial(run_training_command, app, name="midus train")

"""The `midus train` command."""

from functools import partial
from typing import Annotated

from midus_hf.cli.command_line import command_line, run_command
from midus_hf.cli.options import argument
from midus_hf.cli.training.command import Model, Output, Overrides, check_request, keys_of, train_in_group
from midus_hf.cli.training.printed_config import print_config_option


def _arguments() -> type:
    from midus_hf.training.arguments import TrainArguments

    return TrainArguments


app = command_line()


@app.command()
def midus_train(
    config: Annotated[str, argument("Texts, or a YAML file of keys; recipes are in configs/train.", "TEXTS|CONFIG")],
    overrides: Overrides = None,
    model: Model = None,
    output: Output = None,
    print_config: Annotated[str | None, print_config_option("train", _arguments)] = None,
) -> None:
    """Train a model on text: an upscaled model, any other model, or a new one from random weights.

    An upscaled model trains the parameters that its method names, unless the recipe says otherwise. Every key of
    transformers.TrainingArguments works. A printed recipe has every key of memories and texts with its default and
    meaning.

    \b
    midus train TEXTS --model UPSCALED --output TRAINED
    midus train --print-config midus-hml > recipe.yaml
    midus train recipe.yaml model_name_or_path=UPSCALED corpus=TEXTS
    """
    check_request("train", config, overrides or [], model, output)
    from midus_hf.training.run import TrainingRun

    train_in_group(TrainingRun, _arguments(), "train", config, overrides or [], model, output)


main = partial(run_command, app, name="midus train", raises=True, keys=lambda: keys_of(_arguments))

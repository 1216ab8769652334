"""The `midus sft` command."""

import importlib.util
from functools import partial
from typing import Annotated

from midus_hf.cli.command_line import WRONG_REQUEST, Ending, command_line, run_command
from midus_hf.cli.options import argument
from midus_hf.cli.training.command import Model, Output, Overrides, check_request, keys_of, train_in_group
from midus_hf.cli.training.printed_config import print_config_option
from midus_hf.config.wording import install_extra

_NEEDED = ("datasets", "peft", "trl")


def _options() -> type:
    from midus_hf.training.sft.arguments import SftArguments

    return SftArguments


app = command_line()


@app.command()
def midus_sft(
    config: Annotated[str, argument("Chats, or a YAML file of keys; recipes are in configs/sft.", "CHATS|CONFIG")],
    overrides: Overrides = None,
    model: Model = None,
    output: Output = None,
    print_config: Annotated[str | None, print_config_option("sft", _options)] = None,
) -> None:
    """Fine-tune a model on chats, with the loss of answers alone.

    A printed recipe has every key with its default and meaning. A key that transformers.TrainingArguments or
    TRL's sft has as well is named as there.

    \b
    midus sft CHATS.jsonl --model MODEL --output TUNED
    midus sft --print-config midus-hml > recipe.yaml
    midus sft recipe.yaml model_name_or_path=MODEL dataset_name=CHATS.jsonl
    """
    absent = [package for package in _NEEDED if importlib.util.find_spec(package) is None]
    if absent:
        raise Ending(
            WRONG_REQUEST,
            f"midus sft needs {', '.join(absent)}, not installed; {install_extra('train')}.",
        )
    check_request("sft", config, overrides or [], model, output)
    from midus_hf.training.sft import SftRun

    train_in_group(SftRun, _options(), "sft", config, overrides or [], model, output)


main = partial(run_command, app, name="midus sft", raises=True, keys=lambda: keys_of(_options))

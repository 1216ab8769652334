"""The `midus sft` command."""

import importlib.util
from functools import partial
from typing import Annotated

from midus_hf.cli.command_line import WRONG_REQUEST, CommandExit, argument, command_line, run_command
from midus_hf.cli.train import HELP, WITH_FLAGS, print_keys, train_in_group
from midus_hf.config.errors import install_extra, print_note

_NEEDED = ("datasets", "peft", "trl")

app = command_line()


@app.command(**WITH_FLAGS)
def midus_sft(
    words: Annotated[list[str], argument("Chats or a recipe (.yaml), then keys.", "CHATS|RECIPE [--KEY VALUE ...]")],
) -> None:
    """Fine-tune a model on chats, with the loss only on answers.

    Recipes are in configs/sft; a flag replaces the key of a recipe. midus sft --help explains the keys.

    \b
    midus sft CHATS.jsonl --model MODEL --output TUNED
    midus sft recipe.yaml --learning_rate 1e-4 --model MODEL --dataset_name CHATS.jsonl
    """
    if HELP & {*words}:
        from midus_hf.training.keys import SftKeys

        print_keys(SftKeys, midus_sft, "TRL's SFTConfig, with those of transformers.TrainingArguments,")
        return
    absent = [package for package in _NEEDED if importlib.util.find_spec(package) is None]
    if absent:
        raise CommandExit(
            WRONG_REQUEST, f"midus sft needs {', '.join(absent)}, not installed; {install_extra('train')}."
        )
    if "--help=all" in words:
        print_note("reading the Trainer's keys ...")  # takes seconds
    from midus_hf.training.sft.run import SftArguments, finetune

    if "--help=all" in words:
        print_keys(SftArguments, midus_sft)
    else:
        train_in_group(words, SftArguments, finetune)


main = partial(run_command, app, name="midus sft", raises=True)

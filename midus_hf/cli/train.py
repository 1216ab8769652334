"""`midus train`, and code that `midus sft` shares with it: a recipe and flags become the arguments of one run.

The words are first split into keys. Names, paths and models are checked next; then `HfArgumentParser`, which needs torch, parses
the values, as in every script of the Trainer.
"""

import argparse
import dataclasses
import gc
import importlib
import inspect
import itertools
import re
import sys
import time
import typing
from collections.abc import Container, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from midus_hf.anatomy.record import UpscaleRecord, record_of
from midus_hf.cli.command_line import FAILED, WRONG_REQUEST, Ending, command_line, is_main_process, run_command
from midus_hf.cli.options import argument
from midus_hf.cli.training_keys import KEYS, are_all_known
from midus_hf.config.options import alternatives_of
from midus_hf.config.refusals import is_refusal
from midus_hf.config.yaml_options import from_mapping, read_mapping, read_yaml
from midus_hf.model_names import saved_config
from midus_hf.training.early_checks import SOURCES, check_early
from midus_hf.training.optim.rates import short_run_rates, trains_new_parts

# For a command that passes its flags on to the parser that `--help` describes.
WITH_FLAGS: dict[str, Any] = {"add_help_option": False, "context_settings": {"ignore_unknown_options": True}}

# By command: modules of the arguments and the run, the key of the texts, and that of the length of a sequence.
_ARGUMENTS = {
    "train": "midus_hf.training.arguments.TrainArguments",
    "sft": "midus_hf.training.sft.arguments.SftArguments",
}
_RUNS = {"train": "midus_hf.training.run.run_training", "sft": "midus_hf.training.sft.finetune"}
_TEXTS = {"train": "corpus", "sft": "dataset_name"}
_LENGTH = {"train": "sequence_length", "sft": "max_length"}

# Keys that also have a short name.
_SHORT_NAMES = {"--model": "model_name_or_path", "--output": "output_dir"}

# Keys for a run without a recipe.
_SHORT_RUN = {"num_train_epochs": 3, "per_device_train_batch_size": 4, "logging_steps": 0.05}
_LEAST_STEPS = 100
_RATES = {"new": short_run_rates(1e-3), "all": {"learning_rate": 1e-4}}


app = command_line()


@app.command(**WITH_FLAGS)
def midus_train(
    words: Annotated[list[str], argument("Texts or a recipe (.yaml), then keys.", "TEXTS|RECIPE [--KEY VALUE ...]")],
) -> None:
    """Train a model on text: an upscaled model, any other model, or a new one from random weights.

    An upscaled model trains the parameters that its method names, unless trainable says otherwise. Recipes are in
    configs/train; a flag replaces the key of a recipe. Every key of transformers.TrainingArguments works:
    midus train --help lists all.

    \b
    midus train TEXTS --model UPSCALED --output TRAINED
    midus train recipe.yaml --learning_rate 1e-3 --model UPSCALED --corpus TEXTS
    """
    train_in_group("train", words)


def train_in_group(command: str, words: Sequence[str]) -> None:
    """Read the arguments of a run, `"train"` or `"sft"`, train, and print one line about the result."""
    if {"-h", "--help"} & {*words}:
        flag_parser(command).print_help()
        return
    ending = _train(command, words)  # which raises none, since an exception would keep the trainer alive
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        # Cycles of trainer and model keep the group, and so its threads, alive. gloo threads that still release tensors can deadlock
        # with the garbage collector, so the pause lets them finish.
        time.sleep(0.5)
        gc.collect()
    if ending is not None:
        raise ending


def _train(command: str, words: Sequence[str]) -> Ending | None:
    try:
        given = given_keys(command, words)
        check_given(command, given)
        return _run(command, read_arguments(command, given))
    except ValueError as error:
        if not is_refusal(error):
            raise
        return Ending(WRONG_REQUEST, str(error))


def _run(command: str, arguments: Any) -> Ending | None:
    from midus_hf.training.callbacks import RunInterrupted
    from midus_hf.training.saving import PartialSaveError
    from midus_hf.training.trainer import NotFiniteError

    try:
        result = _imported(_RUNS[command])(arguments)
    except RunInterrupted as interrupted:
        return Ending(128 + interrupted.signal_number, str(interrupted))
    except (NotFiniteError, PartialSaveError) as error:
        return Ending(FAILED, str(error))
    if is_main_process():
        loss = "" if result.loss is None else f", loss {result.loss:.4f}"
        print(f"{result.output}: {result.steps:,} steps, {result.tokens:,} tokens{loss}")
    return None


def flag_parser(command: str) -> Any:
    """Return the `HfArgumentParser` of a command. Keys of this package are described by docstrings."""
    from transformers import HfArgumentParser

    arguments_class = _imported(_ARGUMENTS[command])
    described = _descriptions(arguments_class)
    for field in dataclasses.fields(arguments_class):
        if field.name in described:
            field.metadata = MappingProxyType({**field.metadata, "help": described[field.name]})
    main = _imported(f"midus_hf.cli.{command}.midus_{command}")
    parser = HfArgumentParser(
        arguments_class,
        prog=f"midus {command}",
        usage=f"midus {command} TEXTS|RECIPE [--KEY VALUE ...]",
        description=(inspect.getdoc(main) or "").replace("\b\n", ""),
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    for name, key in _SHORT_NAMES.items():
        parser.add_argument(name, dest=key, help=f"Same as --{key}.", default=argparse.SUPPRESS)
    return parser


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Help with defaults, and with the lines of the description as they are."""


def _descriptions(arguments_class: type) -> dict[str, str]:
    """Return the description of each key from our docstrings; for keys with another default, from the class that sets it."""
    described: dict[str, str] = {}
    for kind in arguments_class.__mro__:
        for name, field in getattr(kind, "__dataclass_fields__", {}).items():
            if "help" in field.metadata:
                described.setdefault(name, field.metadata["help"])
        if kind.__module__.startswith("midus_hf."):
            arguments = (inspect.getdoc(kind) or "").partition("Args:\n")[2].partition("\n\nRaises:")[0]
            for entry in re.finditer(r"^    (\w+): (.*(?:\n      +.*)*)", arguments, re.MULTILINE):
                described.setdefault(entry.group(1), " ".join(entry.group(2).split()).replace("%", "%%"))
    return described


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


class GivenKeys(NamedTuple):
    """Keys with values, from a recipe or for texts; and by key, the words after each flag, and the flag as it was written."""

    values: dict[str, Any]
    words: dict[str, list[str]]
    flags: dict[str, str]
    is_recipe: bool


def given_keys(command: str, words: Sequence[str]) -> GivenKeys:
    """Split a command line into keys."""
    first, flags = ("", words) if not words or words[0].startswith("-") else (words[0], words[1:])
    is_recipe = first.endswith((".yaml", ".yml"))
    if first and (Path(first) / "config.json").is_file():
        raise ValueError(f"{first!r} is a model; expected texts. Run 'midus {command} TEXTS --model {first}'.")
    values = read_mapping(first) if is_recipe else {_TEXTS[command]: first} if first else {}
    by_key: dict[str, list[str]] = {}
    written: dict[str, str] = {}
    behind: list[str] | None = None
    for word in flags:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            key = _SHORT_NAMES.get(name, name[2:].replace("-", "_"))
            written[key], by_key[key] = name, [value] if equals else []
            behind = by_key[key]
        elif behind is None:
            raise _no_key(command, name)
        else:
            behind.append(word)
    for key in by_key.keys() & values.keys() if not is_recipe else ():
        raise ValueError(f"{key} is given twice, by {first!r} and by --{key}; expected it once. Leave one out.")
    return GivenKeys(values, by_key, written, is_recipe)


def check_given(command: str, given: GivenKeys) -> None:
    """Reject unknown keys, and paths and models that do not exist, before torch is imported."""
    if are_all_known(command):
        _check_names(command, given, KEYS[command])
    if not given.is_recipe and "output_dir" not in given.words:
        usage = f"midus {command} TEXTS --model MODEL --output DIR"
        raise ValueError(f"--output is missing; run '{usage}', or give a recipe, a .yaml file.")
    check_early(command, given.values | _unread(given.words))


def read_arguments(command: str, given: GivenKeys) -> Any:
    """Return the arguments of a run, `"train"` or `"sft"`: a recipe with flags over it, or texts with keys for a short run."""
    arguments_class, quiet = _imported(_ARGUMENTS[command]), not is_main_process()
    hints = typing.get_type_hints(arguments_class)
    _check_names(command, given, hints)
    keys = given.values | _read(command, given.words, hints)
    chosen = {} if given.is_recipe else _short_run(command, keys, quiet)
    arguments = from_mapping(arguments_class, chosen | keys)
    if command == "train" and "num_train_epochs" in chosen and "num_train_epochs" not in keys:
        arguments.least_steps = _LEAST_STEPS
    if not quiet and "num_train_epochs" in keys and arguments.max_steps > 0:
        steps = f"max_steps={arguments.max_steps} overrides num_train_epochs"
        print(f"{steps}; pass --max_steps -1 to use epochs", file=sys.stderr)
    return arguments


def _no_key(command: str, name: str) -> ValueError:
    return ValueError(
        f"{name!r} is not a key; expected --KEY VALUE (KEY: VALUE in a recipe). See 'midus {command} --help'."
    )


def _check_names(command: str, given: GivenKeys, known: Container[str]) -> None:
    for name in given.values:
        if name not in known:
            raise _no_key(command, name)
    for key, flag in given.flags.items():
        if key not in known and key.removeprefix("no_") not in known:
            raise _no_key(command, flag)


def _unread(words: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return words as text, or as YAML if a key can have several values, for checks before the parser can be imported."""
    unread: dict[str, Any] = {}
    for key, behind in words.items():
        value = behind[0] if len(behind) == 1 else behind or True
        unread[key] = None if value == "null" else _as_yaml(key, value) if key in (*SOURCES, "adapters") else value
    return unread


def _read(command: str, words: Mapping[str, list[str]], hints: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that `HfArgumentParser` reads from words, and None for `null`, which it does not know."""
    none = {key: None for key, behind in words.items() if behind == ["null"]}
    said = {key: behind for key, behind in words.items() if key not in none}
    # One word may begin with a dash.
    line = [[f"--{key}={behind[0]}"] if len(behind) == 1 else [f"--{key}", *behind] for key, behind in said.items()]
    # Flags that are not given stay None, and so differ from flags with the default value.
    unsaid = argparse.Namespace(**dict.fromkeys(hints))
    try:
        parsed, unknown = flag_parser(command).parse_known_args([*itertools.chain(*line)], unsaid)
    except argparse.ArgumentError as error:
        raise ValueError(f"{error}.") from None
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not a value of a key; expected --KEY VALUE.")
    return none | {
        key: _said(key, hints.get(key, str), value) for key, value in vars(parsed).items() if value is not None
    }


def _said(key: str, hint: Any, value: Any) -> Any:
    """Return the value of a flag for a key that takes text or another type: one word is not a list; lists and mappings are YAML."""
    kinds = alternatives_of(hint)
    if str in kinds and isinstance(value, list) and len(value) <= 1:
        value = value[0] if value else True
    return _as_yaml(key, value) if {*kinds} - {str, type(None)} else value


def _as_yaml(key: str, value: Any) -> Any:
    if isinstance(value, str) and (value[:1] in ("{", "[") or value in ("true", "false")):
        return read_yaml(value, f"--{key}")
    return value


def _short_run(command: str, keys: Mapping[str, Any], quiet: bool) -> dict[str, Any]:
    """Return keys for a short run, and print those that are used because the command line does not set them."""
    recorded = (record_of(saved_config(str(keys.get("model_name_or_path")))) or UpscaleRecord()).trainable
    chosen = {_LENGTH[command]: 256, **_SHORT_RUN, **_RATES["new" if trains_new_parts(keys, recorded) else "all"]}
    if keys.get("max_steps") not in (None, -1):  # which the Trainer prefers to epochs
        del chosen["num_train_epochs"]
    short_run = {key: f"{value:g}" for key, value in chosen.items() if key not in keys}
    if command == "train" and "num_train_epochs" in short_run:
        short_run["num_train_epochs"] += f" (more for fewer than {_LEAST_STEPS} steps)"
    if short_run and not quiet:
        print(f"for a short run: {', '.join(f'{key}={value}' for key, value in short_run.items())}", file=sys.stderr)
    return chosen


main = partial(run_command, app, name="midus train", raises=True)

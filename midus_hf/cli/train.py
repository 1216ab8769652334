"""`midus train`, and what `midus sft` has in common with it: a recipe and flags become the arguments of one run, which is made.

`HfArgumentParser` reads the flags, as it does for every script of the Trainer. It needs torch, so names of keys, paths and packages
are checked before it is made.
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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from midus_hf.cli.command_line import FAILED, WRONG_REQUEST, Ending, command_line, is_main_process, run_command
from midus_hf.cli.options import argument
from midus_hf.config.options import alternatives_of
from midus_hf.config.yaml_options import from_mapping, read_mapping, read_yaml
from midus_hf.model_names import check_sources, saved_config
from midus_hf.training.early_checks import SOURCES, as_numbers, check_early, key_types
from midus_hf.training.optim.rates import short_run_rates, trains_new_parts

# Of a command that passes its flags on, to the parser that `--help` describes.
WITH_FLAGS: dict[str, Any] = {"add_help_option": False, "context_settings": {"ignore_unknown_options": True}}

# By command: where the arguments and the run are, the key of the texts, and that of the length of a sequence.
_ARGUMENTS = {
    "train": "midus_hf.training.arguments.TrainArguments",
    "sft": "midus_hf.training.sft.arguments.SftArguments",
}
_RUNS = {"train": "midus_hf.training.run.TrainingRun", "sft": "midus_hf.training.sft.SftRun"}
_TEXTS = {"train": "corpus", "sft": "dataset_name"}
_LENGTH = {"train": "sequence_length", "sft": "max_length"}

# Keys that have a short name as well.
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
        # Cycles of trainer and model keep the group, and so its threads, alive. A finishing thread of gloo, which releases tensors,
        # would wait for garbage collection for ever, and this for it, so the pause lets it finish.
        time.sleep(0.5)
        gc.collect()
    if ending is not None:
        raise ending


def _train(command: str, words: Sequence[str]) -> Ending | None:
    try:
        if (types := key_types(command)) is not None:  # what can be told before torch and transformers are imported
            several: Any = list[str] | dict[str, str] | str
            hints = {**dict.fromkeys(types, str), **dict.fromkeys(SOURCES, several)}
            keys = _keys(command, words, hints)[0]
            check_early(command, keys | as_numbers(keys, types))
        from midus_hf.library_bars import library_bars_on_terminals

        arguments = read_arguments(command, words)
        check_sources(arguments.sources())
        with library_bars_on_terminals():
            run = _imported(_RUNS[command])(arguments)
    except ValueError as error:
        return Ending(WRONG_REQUEST, str(error))
    from midus_hf.training.callbacks import RunInterrupted
    from midus_hf.training.saving import PartialSaveError
    from midus_hf.training.trainer import NotFiniteError

    try:
        result = run.execute()
    except RunInterrupted as interrupted:
        return Ending(128 + interrupted.signal_number, str(interrupted))
    except (NotFiniteError, PartialSaveError) as error:
        return Ending(FAILED, str(error))
    if is_main_process():
        loss = "" if result.loss is None else f", loss {result.loss:.4f}"
        print(f"{result.output}: {result.steps:,} steps, {result.tokens:,} tokens{loss}")
    return None


def flag_parser(command: str) -> Any:
    """Return the `HfArgumentParser` of a command. Docstrings describe the keys that are ours."""
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
    """Return the description of each key, from docstrings of ours, and of keys with another default from the class that has them."""
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


def read_arguments(command: str, words: Sequence[str]) -> Any:
    """Return the arguments of a run, `"train"` or `"sft"`: a recipe with flags over it, or texts with keys for a short run."""
    quiet = not is_main_process()
    arguments_class = _imported(_ARGUMENTS[command])
    keys, is_recipe = _keys(command, words, typing.get_type_hints(arguments_class), flag_parser)
    chosen = {} if is_recipe else _short_run(command, keys, quiet)
    arguments = from_mapping(arguments_class, chosen | keys)
    if command == "train" and "num_train_epochs" in chosen and "num_train_epochs" not in keys:
        arguments.least_steps = _LEAST_STEPS
    if not quiet and "num_train_epochs" in keys and arguments.max_steps > 0:
        steps = f"max_steps={arguments.max_steps} counts, and not num_train_epochs"
        print(f"{steps}; --max_steps -1 lets epochs count", file=sys.stderr)
    return arguments


def _keys(
    command: str, words: Sequence[str], hints: Mapping[str, Any], parser_of: Callable[[str], Any] | None = None
) -> tuple[dict[str, Any], bool]:
    """Return the keys that a command line gives, with values of their types if there is a parser, and whether there is a recipe."""
    first, flags = ("", words) if not words or words[0].startswith("-") else (words[0], words[1:])
    is_recipe = first.endswith((".yaml", ".yml"))
    if first and (Path(first) / "config.json").is_file():
        raise ValueError(f"{first!r} is a model, and texts are expected; run 'midus {command} TEXTS --model {first}'.")
    values = read_mapping(first) if is_recipe else {_TEXTS[command]: first} if first else {}
    said = _words_by_key(flags, values, hints, f"See 'midus {command} --help'.")
    given: dict[str, Any] = {key: words for key, words in said.items() if words != ["null"]}
    if parser_of is not None:
        # Flags that are not given stay None, and so differ from those that say what is the default.
        unsaid = argparse.Namespace(**dict.fromkeys(hints))
        try:
            # One word may begin with a dash.
            line = [[f"--{key}={said[0]}"] if len(said) == 1 else [f"--{key}", *said] for key, said in given.items()]
            parsed, unknown = parser_of(command).parse_known_args([*itertools.chain(*line)], unsaid)
        except argparse.ArgumentError as error:
            raise ValueError(f"{error}.") from None
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no value of a key; expected --KEY VALUE.")
        given = {key: value for key, value in vars(parsed).items() if value is not None}
    given = {key: _said(key, hints.get(key, str), value) for key, value in given.items()}
    given |= {key: None for key, words in said.items() if words == ["null"]}  # which the parser does not know
    for key in given.keys() & values.keys() if not is_recipe else ():
        raise ValueError(f"{key} is given twice, by {first!r} and by --{key}; expected it once. Leave one out.")
    keys = values | given
    if not is_recipe and "output_dir" not in keys:
        usage = f"midus {command} TEXTS --model MODEL --output DIR"
        raise ValueError(f"--output is missing; run '{usage}', or give a recipe, a .yaml file.")
    return keys, is_recipe


def _words_by_key(
    flags: Sequence[str], recipe: Mapping[str, Any], hints: Mapping[str, Any], see: str
) -> dict[str, list[str]]:
    """Return the words behind each flag by its key, and refuse what is no key, of the recipe too."""
    said: dict[str, list[str]] = {}
    names = {name: name for name in recipe}
    words: list[str] | None = None
    for word in flags:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            key = _SHORT_NAMES.get(name, name[2:].replace("-", "_"))
            words = said[key] = [value] if equals else []
            names[name] = key if key in hints else key.removeprefix("no_")
        elif words is None:
            names[name] = ""
        else:
            words.append(word)
    for name, key in names.items():
        if key not in hints:
            raise ValueError(f"{name!r} is no key; expected --KEY VALUE (KEY: VALUE in a recipe). {see}")
    return said


def _said(key: str, hint: Any, value: Any) -> Any:
    """Return what a flag says for a key that takes text or something else: one word is no list, and a list or a mapping is YAML."""
    kinds = alternatives_of(hint)
    if str in kinds and isinstance(value, list) and len(value) <= 1:
        value = value[0] if value else True
    takes_more = bool({*kinds} - {str, type(None)})
    if takes_more and isinstance(value, str) and (value[:1] in ("{", "[") or value in ("true", "false")):
        return read_yaml(value, f"--{key}")
    return value


def _short_run(command: str, keys: Mapping[str, Any], quiet: bool) -> dict[str, Any]:
    """Return keys for a short run, and say which of them count because the command line does not have them."""
    recorded = saved_config(str(keys.get("model_name_or_path"))).get("upscale", {}).get("trainable")
    chosen = {_LENGTH[command]: 256, **_SHORT_RUN, **_RATES["new" if trains_new_parts(keys, recorded) else "all"]}
    if keys.get("max_steps") not in (None, -1):  # which the Trainer prefers to epochs
        del chosen["num_train_epochs"]
    own = {key: f"{value:g}" for key, value in chosen.items() if key not in keys}
    if command == "train" and "num_train_epochs" in own:
        own["num_train_epochs"] += f" (more for fewer than {_LEAST_STEPS} steps)"
    if own and not quiet:
        print(f"for a short run: {', '.join(f'{key}={value}' for key, value in own.items())}", file=sys.stderr)
    return chosen


main = partial(run_command, app, name="midus train", raises=True)

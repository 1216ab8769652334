"""Recipe and flags of `midus train` and `midus sft`, read by Transformers' `HfArgumentParser`."""

import argparse
import copy
import dataclasses
import difflib
import inspect
import re
import shlex
import sys
import textwrap
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser

from midus_hf.anatomy.record import UpscaleRecord, record_of
from midus_hf.config.errors import RequestError, is_main_process, print_note
from midus_hf.config.options import alternatives_of
from midus_hf.config.yaml_options import from_mapping, read_mapping, read_yaml
from midus_hf.sources.names import saved_config
from midus_hf.training.keys import ENOUGH_STEPS, NEW_RATE, short_run_rates, trains_new_parts

_SHORT_NAMES = {"model": "model_name_or_path", "output": "output_dir"}
# How a command's usage writes the key of its texts.
_TEXTS = {"corpus": "TEXTS", "dataset_name": "CHATS"}

# The rate of values in a run without a recipe, if the rate of the rest is given.
_VALUE_RATE = short_run_rates(NEW_RATE)["value_learning_rate"]

_NOT_GIVEN = object()


def read_arguments(arguments_class: Any, words: Sequence[str]) -> Any:
    """Return the arguments of a run: a recipe with flags over it, or texts with keys for a short run."""
    command, data_key = arguments_class.command, arguments_class.data_key
    texts = _TEXTS[data_key]
    first, flags = (words[0], words[1:]) if words and not words[0].startswith("-") else ("", words)
    is_recipe = first.endswith((".yaml", ".yml"))
    if first and (Path(first) / "config.json").is_file():
        raise RequestError(
            f"{first!r} is a model; expected {texts.lower()}. Run 'midus {command} {texts} --model {first}'."
        )
    if is_recipe:
        given = read_mapping(first)
    else:
        given = {data_key: first} if first else {}
    keys = _with_flags(arguments_class, given, flags)
    if not is_recipe and first and keys[data_key] != first:
        raise RequestError(
            f"{data_key} is given twice, by {first!r} and by --{data_key}; expected it once. Leave one out."
        )
    if not is_recipe and "output_dir" not in keys:
        usage = f"midus {command} {texts} --model MODEL --output DIR"
        raise RequestError(f"--output is missing; run '{usage}', or give a recipe, a .yaml file.")
    names = {word.partition("=")[0] for word in flags}
    if "--adapters" in names and "--trainable" not in names and given.get("trainable", "auto") != "auto":
        print_note(f"--adapters replaces trainable: {keys.pop('trainable')} of {first}")
    chosen = {} if is_recipe else _short_run(arguments_class, keys)
    arguments = from_mapping(arguments_class, chosen | keys)
    if is_main_process() and "num_train_epochs" in keys and arguments.max_steps > 0:
        steps = f"max_steps={arguments.max_steps} overrides num_train_epochs"
        print(f"{steps}; pass --max_steps -1 to use epochs", file=sys.stderr)
    return arguments


def _with_flags(arguments_class: Any, given: Mapping[str, Any], flags: Sequence[str]) -> dict[str, Any]:
    """Return the keys of a recipe with those of flags, which win; refuse unknown ones."""
    parser = RunParser(arguments_class)
    names = [field.name for field in dataclasses.fields(arguments_class) if field.init]
    known = [*names, *_SHORT_NAMES]
    keys = argparse.Namespace(**{name: given.get(name, _NOT_GIVEN) for name in names})
    try:
        _, unknown = parser.parse_known_args(flags, keys)
    except argparse.ArgumentError as error:
        raise RequestError(f"{error}.") from None
    unknown_keys = [str(name) for name in given if name not in names]
    unknown_keys += [word.partition("=")[0] for word in unknown if word.startswith("--")]
    if unknown_keys:
        told = " ".join(_not_a_key(name, known) for name in unknown_keys)
        raise RequestError(
            f"{told} Expected --KEY VALUE (KEY: VALUE in a recipe); see 'midus {arguments_class.command} --help'."
        )
    if unknown:
        expected = f"expected {_TEXTS[arguments_class.data_key]} or a recipe first, then --KEY VALUE"
        if not given and Path(unknown[0]).exists():
            words = [unknown[0], *(word for word in flags if word != unknown[0])]
            expected += f": 'midus {arguments_class.command} {shlex.join(words)}'"
        raise RequestError(f"{unknown[0]!r} is not a value of a key; {expected}.")
    return {key: value for key, value in vars(keys).items() if value is not _NOT_GIVEN}


def _not_a_key(name: str, known: Iterable[str]) -> str:
    bare = name.removeprefix("--")
    nearest = difflib.get_close_matches(bare.replace("-", "_"), known, 1)
    if bare == name:
        nearest = [_SHORT_NAMES.get(each, each) for each in nearest]
    return f"{name!r} is not a key" + (f"; did you mean {name.removesuffix(bare)}{nearest[0]}?" if nearest else ".")


def _short_run(arguments_class: Any, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that a run without a recipe gets by default; print the ones that are not given."""
    recorded = (record_of(saved_config(str(keys.get("model_name_or_path")))) or UpscaleRecord()).trainable
    chosen = _short_run_keys(arguments_class)
    if keys.get("learning_rate") is not None:
        del chosen["learning_rate"]
        if recorded is not None and trains_new_parts(keys, recorded):  # other models have no values
            chosen["value_learning_rate"] = _VALUE_RATE
    if keys.get("max_steps") not in (None, -1):  # which the Trainer prefers to epochs
        del chosen["num_train_epochs"]
    if keys.get("eval_text") is not None:  # which is measured in place of a share
        del chosen["eval_share"]
        chosen["eval_on_start"] = True
    later = {"num_train_epochs": f"3 (more for fewer than {ENOUGH_STEPS} steps)", "learning_rate": "measured"}
    told = {key: later[key] if value is None else value for key, value in chosen.items() if key not in keys}
    if told and is_main_process():
        print(f"for a short run: {', '.join(f'{key}={value}' for key, value in told.items())}", file=sys.stderr)
    return chosen


def _short_run_keys(arguments_class: Any) -> dict[str, Any]:
    epochs = 3 if arguments_class.command == "sft" else None  # which the run chooses by the number of its sequences
    sizes = {arguments_class.length_key: 256, "num_train_epochs": epochs}
    return {
        **sizes,
        "per_device_train_batch_size": 4,
        "logging_steps": 0.05,
        "eval_share": 0.05,
        "learning_rate": None,
    }


class RunParser(HfArgumentParser):
    """`HfArgumentParser` of a command, which reads `null`, numbers, mappings and lists as in recipes."""

    def __init__(self, arguments_class: Any, description: str | None = None, epilog: str | None = None):
        self._hints = typing.get_type_hints(arguments_class)
        super().__init__(
            arguments_class,
            prog=f"midus {arguments_class.command}",
            usage=f"midus {arguments_class.command} {_TEXTS[arguments_class.data_key]}|RECIPE [--KEY VALUE ...]",
            description=description,
            epilog=epilog,
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
            exit_on_error=False,
        )
        described: dict[str, str] = {}  # from our docstrings, in their order, then from the Trainer's classes
        for kind in arguments_class.__mro__:
            if kind.__module__.startswith("midus_hf."):
                arguments = (inspect.getdoc(kind) or "").partition("Args:\n")[2].partition("\n\nRaises:")[0]
                for entry in re.finditer(r"^    (\w+): (.*(?:\n      +.*)*)", arguments, re.MULTILINE):
                    described.setdefault(entry.group(1), " ".join(entry.group(2).split()).replace("%", "%%"))
        for kind in arguments_class.__mro__:
            for name, field in getattr(kind, "__dataclass_fields__", {}).items():
                if "help" in field.metadata:
                    described.setdefault(name, field.metadata["help"])
        short_run = {
            key: "null" if value is None else value for key, value in _short_run_keys(arguments_class).items()
        }
        short_run["value_learning_rate"] = (
            f"measured with learning_rate; {_VALUE_RATE:g} if that is given and only new parameters or adapters train"
        )
        for key in described.keys() & short_run.keys():
            described[key] += f" Without a recipe: {short_run[key]}."
        for action in self._actions:
            is_negation = action.const is False
            action.help = f"Same as --{action.dest} false." if is_negation else described.get(action.dest, action.help)
        for name, key in _SHORT_NAMES.items():
            self.add_argument(f"--{name}", dest=key, help=f"Same as --{key}.", default=argparse.SUPPRESS)
        order = ["help", *described]
        self._optionals._group_actions.sort(key=lambda action: order.index(action.dest) if action.dest in order else 0)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        kinds = {*alternatives_of(self._hints.get(action.dest, str))}
        word = arg_strings[0] if len(arg_strings) == 1 else ""
        is_number = bool(kinds & {int, float})
        is_collection = word.startswith(("{", "[")) and bool(kinds - {str, type(None)})
        if word == "null" or (word and (is_number or is_collection)):
            return read_yaml(word, f"--{action.dest}")
        values = super()._get_values(action, arg_strings)  # type: ignore[misc]
        return values[0] if str in kinds and isinstance(values, list) and len(values) == 1 else values


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Help with one spelling of each key and one default; paragraphs after `\\b` keep their lines."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.split("\n\n")
        return "\n\n".join(
            part.removeprefix("\b\n") if part.startswith("\b") else textwrap.fill(part, width) for part in paragraphs
        )

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = copy.copy(action)
        shown.option_strings = [name for name in action.option_strings if "_" in name] or action.option_strings
        return super()._format_action_invocation(shown)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return "VALUE"

    def _get_help_string(self, action: argparse.Action) -> str | None:
        says_default = "Default: " in (action.help or "") or action.const is False
        return action.help if says_default else super()._get_help_string(action)

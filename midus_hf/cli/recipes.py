"""Read the YAML files of commands, and name the right command if a file belongs to another command."""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from midus_hf.config.yaml_options import from_mapping, read_mapping, with_overrides

Options = TypeVar("Options")

# Command that a key points to, if the file is not for the command at hand. Of several keys, the first one here decides.
_COMMAND_BY_KEY = {
    "variants": "midus compare",
    "corpus": "midus train",
    "dataset_name": "midus sft",
    "method": "upscale --config",
    "tasks": "midus eval MODEL --config",
}


def read_recipe(options_class: type[Options], path: str | Path, overrides: Sequence[str]) -> Options:
    """Return the options of a YAML file as a dataclass.

    Args:
        overrides: Words behind the file, of which each replaces keys: `key=value`, or the path of another YAML file, whose
            mappings are merged with those before.

    Raises:
        ValueError: As `read_config`. If the file is for another command, the message names that command.
    """
    values = read_mapping(path)
    present = {*values, *(word.partition("=")[0] for word in overrides)}
    try:
        for word in overrides:
            if word.endswith((".yaml", ".yml")) and "=" not in word:
                values = _merged(values, read_mapping(word))
            else:
                values = with_overrides(options_class, values, [word])
        return from_mapping(options_class, values)
    except ValueError as error:
        other = other_command(options_class, path, present)
        if other is None:
            raise
        raise ValueError(other) from error


def _merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a mapping with changes; where both hold a mapping, the two are merged in the same way."""
    merged = dict(values)
    for key, change in changes.items():
        before = merged.get(key)
        if isinstance(before, dict) and isinstance(change, dict):
            change = _merged(before, change)
        merged[key] = change
    return merged


def other_command(options_class: type, path: str | Path, keys: Iterable[str]) -> str | None:
    """Return a message that names the command whose file has some keys; None if the file may be for this command."""
    fields: Any = dataclasses.fields(options_class)
    of_commands = [key for key in _COMMAND_BY_KEY if key in set(keys)]
    if not of_commands or any(field.name in of_commands for field in fields):
        return None
    return f"{path} has {of_commands[0]!r}, a key of another command; run '{_COMMAND_BY_KEY[of_commands[0]]} {path}'."

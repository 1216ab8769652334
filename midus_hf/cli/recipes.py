"""Read the YAML files of commands, and name the right command if a file belongs to another command."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from midus_hf.config.yaml_options import from_mapping, read_mapping, with_overrides

Options = TypeVar("Options")

_COMMAND_BY_KEY = {
    "variants": "midus compare",
    "corpus": "midus train",
    "dataset_name": "midus sft",
    "method": "upscale --config",
    "tasks": "midus eval MODEL --config",
}
"""The command of each key that only one command's files have."""


def read_recipe(options_class: type[Options], path: str | Path, overrides: Sequence[str]) -> Options:
    """Return the options of a YAML file, some of which `key=value` overrides replace.

    Args:
        options_class: Dataclass of the options.
        path: Path of the YAML file.
        overrides: Words `key=value` that replace options of the file.

    Raises:
        ValueError: As `read_config`. If the file is for another command, the message names that command.
    """
    values = read_mapping(path)
    present = {*values, *(word.partition("=")[0] for word in overrides)}
    try:
        return from_mapping(options_class, with_overrides(options_class, values, overrides))
    except ValueError as error:
        command_keys = [key for key in _COMMAND_BY_KEY if key in present]
        fields: Any = options_class
        if not command_keys or any(field.name in command_keys for field in dataclasses.fields(fields)):
            raise
        command = _COMMAND_BY_KEY[command_keys[0]]
        raise ValueError(
            f"{path} has {command_keys[0]!r}, a key of another command; run '{command} {path}'."
        ) from error

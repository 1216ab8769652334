"""Read the YAML files of commands: a file of one command that is given to another is called that."""

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
"""Which command's files have a key that those of no other command have."""


def read_recipe(options_class: type[Options], path: str | Path, overrides: Sequence[str]) -> Options:
    """Return the options of a YAML file, some of them replaced by words `key=value`.

    Args:
        options_class: A dataclass.
        path: The file.
        overrides: As in `read_config`.

    Raises:
        ValueError: As `read_config`; of a file of another command the message names that.
    """
    values = read_mapping(path)
    present = {*values, *(word.partition("=")[0] for word in overrides)}
    try:
        return from_mapping(options_class, with_overrides(options_class, values, overrides))
    except ValueError as error:
        telling = [key for key in _COMMAND_BY_KEY if key in present]
        fields: Any = options_class
        if not telling or any(field.name in telling for field in dataclasses.fields(fields)):
            raise
        command = _COMMAND_BY_KEY[telling[0]]
        raise ValueError(f"{path} has {telling[0]!r}, a key of another command; run '{command} {path}'.") from error

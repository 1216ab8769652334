"""Read the YAML files of commands: a file of one command that is given to another is called that."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from midus_hf.config.yaml_options import from_mapping, read_mapping, with_overrides

Options = TypeVar("Options")

_COMMAND_BY_KEY = {
    "arms": "midus compare",
    "corpus": "midus train",
    "data": "midus sft",
    "method": "upscale --config",
    "tasks": "midus eval MODEL --config",
}
"""Which command's files have a key that those of no other command have; the first that is there decides."""


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
        fields: Any = getattr(options_class, "__dataclass_fields__", {})
        command = next((command for key, command in _COMMAND_BY_KEY.items() if key in present), None)
        own = next((key for key in _COMMAND_BY_KEY if key in present), None)
        if command is None or own in fields:
            raise
        raise ValueError(f"{path} has {own!r}, a key of another command; run '{command} {path}'.") from error

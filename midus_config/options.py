"""Options of methods: dataclasses that refuse what they do not know."""

import copy
import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from midus_config.wording import near_matches

_TYPE_NAMES = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "true or false",
    dict: "a mapping",
    list: "a list",
    type(None): "null",
}


def read_options(options_class: type, values: Mapping[str, Any], what: str) -> Any:
    """Fill an options dataclass.

    A dataclass may have `presets`, a class attribute: values of several options under one name. The key `preset` chooses
    one; options that are given as well win.

    Args:
        options_class: The dataclass; its `__post_init__` may raise ValueError for values out of range.
        values: What the person gave, as YAML scalars.
        what: Whose options they are, for messages.

    Raises:
        ValueError: If a key is unknown or a value has the wrong type.
    """
    fields = {field.name: field for field in dataclasses.fields(options_class)}
    hints = typing.get_type_hints(options_class)
    presets: dict[str, dict[str, Any]] = getattr(options_class, "presets", {})
    parsed: dict[str, Any] = {}
    if presets:
        preset = values.get("preset")
        if preset is not None and preset not in list(presets):
            raise ValueError(f"preset is {preset!r}; expected one of: {', '.join(presets)}.")
        parsed.update({} if preset is None else presets[preset])
        values = {key: value for key, value in values.items() if key != "preset"}
    for key, value in values.items():
        if key not in fields:
            known = near_matches(str(key), [*fields, *(["preset"] if presets else [])]) if fields else "It has none."
            raise ValueError(f"{what} has no option {key!r}. {known}")
        parsed[key] = _checked(key, value, hints[key])
    return options_class(**parsed)


def describe_options(options_class: type) -> list[dict[str, Any]]:
    """Name, type, default and meaning of every option."""
    hints = typing.get_type_hints(options_class)
    described = [
        {
            "name": field.name,
            "type": field.metadata.get("type") or _type_name(hints[field.name]),
            "default": _default(field),
            "help": field.metadata.get("help", ""),
        }
        for field in dataclasses.fields(options_class)
    ]
    presets: dict[str, dict[str, Any]] = getattr(options_class, "presets", {})
    if presets:
        meaning = "; ".join(
            f"{name}: {', '.join(f'{key}={value}' for key, value in values.items())}"
            for name, values in presets.items()
        )
        described.append(
            {
                "name": "preset",
                "type": " | ".join(presets),
                "default": None,
                "help": f"several options at once ({meaning})",
            }
        )
    return described


def option(default: Any, help: str, type: str = "") -> Any:
    """A dataclass field with a default and a line that explains it to people.

    Args:
        default: The default; a list or mapping is copied for every use.
        help: What the option means.
        type: What values it takes, in words, where its annotation does not say. Default: the annotation's words.
    """
    metadata = {"help": help, "type": type}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def finite_number(value: Any) -> float | None:
    """A number, also from text, since YAML takes `1e-4`, which has no point, for text; None where it is no finite one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _checked(key: str, value: Any, hint: Any) -> Any:
    if hint is Any:
        return value
    if typing.get_origin(hint) is typing.Literal:
        allowed = typing.get_args(hint)
        if value not in allowed:
            raise ValueError(f"{key} is {value!r}; expected one of: {', '.join(map(str, allowed))}.")
        return value
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if value is None and type(None) in typing.get_args(hint):
            return None
        return _checked(key, value, next(arg for arg in typing.get_args(hint) if arg is not type(None)))
    if hint is float:
        number = finite_number(value)
        if number is None:
            raise ValueError(f"{key} is {value!r}; expected a number.")
        return number
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ValueError(f"{key} is {value!r}; expected {_type_name(hint)}.")
    return value


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " | ".join(_type_name(arg) for arg in typing.get_args(hint))
    return _TYPE_NAMES.get(hint, str(hint))

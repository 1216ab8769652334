"""Read options, which are dataclasses, from YAML or JSON values; refuse unknown keys and wrong types."""

import contextlib
import copy
import dataclasses
import enum
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from midus_hf.config.errors import RequestError, first_few, one_of

Options = TypeVar("Options")

_TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    bool: "true or false",
    dict: "a mapping",
    list: "a list",
    type(None): "null",
}
# Words that are text in quotes or as flags, for keys that take what they stand for.
_WORDS = {"true": True, "True": True, "false": False, "False": False, "None": None}
_MAX_CHOICES = 8  # of an enumeration in a message
_TEXTS = (str, list[str], types.NoneType)
_QUOTES = " Put text that YAML reads as another value, such as no or 12, in quotes."


def read_options(
    options_class: type[Options],
    values: Mapping[str, Any],
    subject: str,
    *,
    prefix: str = "",
    how_to_set: str = "set it",
) -> Options:
    """Return an options dataclass with the values of a mapping."""
    fields = {field.name: field for field in dataclasses.fields(typing.cast(Any, options_class))}
    presets: dict[str, dict[str, Any]] = getattr(options_class, "presets", {})
    if presets:
        preset = values.get("preset")
        if preset is not None and preset not in list(presets):
            raise RequestError(f"preset is {preset!r}; expected one of: {', '.join(presets)}.")
        values = {**presets.get(str(preset), {}), **{key: value for key, value in values.items() if key != "preset"}}
    for key in values:
        if key not in fields:
            known = one_of([*fields, *(["preset"] if presets else [])]) if fields else "It has none."
            raise RequestError(f"{subject} has no option {prefix + str(key)!r}. {known}")
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise RequestError(f"{subject} has no {prefix + name!r}; {how_to_set.format(key=prefix + name)}.")
    hints = typing.get_type_hints(options_class)

    def read(hint: Any, value: Any, key: str) -> Any:
        alternatives = alternatives_of(hint)
        if isinstance(value, str) and value in _WORDS:
            is_taken = any(_converted(each, _WORDS[value])[0] for each in alternatives if each is not Any)
            value = _WORDS[value] if is_taken else value
        for alternative in alternatives:
            if dataclasses.is_dataclass(alternative) and value is not None and not isinstance(value, list):
                first = next(iter(dataclasses.fields(alternative))).name
                inner = value if isinstance(value, Mapping) else {first: value}
                read_class = typing.cast(type, alternative)
                return read_options(read_class, inner, subject, prefix=f"{key}.", how_to_set=how_to_set)
            if typing.get_origin(alternative) is list:
                (item_hint,) = typing.get_args(alternative)
                items = _numbers_of(value) if item_hint in (int, float) else None
                if isinstance(value, list) or items is not None:
                    items = value if items is None else items
                    return [read(item_hint, item, f"{key}[{index}]") for index, item in enumerate(items)]
            if typing.get_origin(alternative) is dict and isinstance(value, Mapping):
                _, item_hint = typing.get_args(alternative)
                return {name: read(item_hint, item, f"{key}.{name}") for name, item in value.items()}
            accepted, converted = _converted(alternative, value)
            if accepted:
                if converted == "":
                    raise RequestError(f"{key} is ''; expected a value. Fill it in, or leave it out.")
                return converted
        is_text = str in alternatives and all(each in _TEXTS or _is_enumeration(each) for each in alternatives)
        quotes = _QUOTES if is_text and isinstance(value, int | float) else ""
        raise RequestError(f"{key} is {value!r}; expected {_expected(alternatives)}.{quotes}")

    return options_class(**{key: read(hints[key], value, prefix + key) for key, value in values.items()})


def _numbers_of(value: Any) -> list[float] | None:
    """Return the numbers of a text such as `768,256,16,0`, a list on a command line; None for others."""
    if not isinstance(value, str) or "," not in value:
        return None
    read = [finite_number(word.strip()) for word in value.split(",")]
    numbers = [number for number in read if number is not None]
    return numbers if len(numbers) == len(read) else None


def _converted(alternative: Any, value: Any) -> tuple[bool, Any]:
    """Return whether one alternative of a type accepts a value, and the converted value."""
    if alternative is Any:
        return True, value
    if typing.get_origin(alternative) is typing.Literal:
        return any(type(value) is type(choice) and value == choice for choice in typing.get_args(alternative)), value
    if alternative in (int, float):
        number = None if isinstance(value, str) else finite_number(value)
        if number is not None and (alternative is float or number.is_integer()):
            return True, value if type(value) is alternative else alternative(number)
        return False, None
    if alternative in (bool, str, dict, list, types.NoneType):
        return isinstance(value, alternative), value
    return False, None


def describe_options(options_class: type) -> list[dict[str, Any]]:
    """Return the name, type, default and help of every option, as `name`, `type`, `default` and `help`."""
    hints = typing.get_type_hints(options_class)
    described = [
        {
            "name": field.name,
            "type": field.metadata.get("type") or _listed_type(hints[field.name]),
            "default": field.default if field.default_factory is dataclasses.MISSING else field.default_factory(),
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
        help = f"several options at once ({meaning})"
        described.append({"name": "preset", "type": " | ".join(presets), "default": None, "help": help})
    return described


def option(default: Any, help: str, type: str = "") -> Any:
    """Return a dataclass field with a default, a help text, and accepted values in words."""
    metadata = {"help": help, "type": type}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def finite_number(value: Any) -> float | None:
    """Convert a value, which may be the text of a number, to a finite number, or return None."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    with contextlib.suppress(ValueError, OverflowError):
        number = float(value)
        return number if math.isfinite(number) else None
    return None


def alternatives_of(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or a tuple of the one type."""
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def _expected(alternatives: tuple[Any, ...]) -> str:
    if len(alternatives) == 1 and typing.get_origin(alternatives[0]) is typing.Literal:
        return f"one of: {', '.join(map(str, typing.get_args(alternatives[0])))}"
    if any(_is_enumeration(each) for each in alternatives):  # whose values are given as text
        alternatives = tuple(each for each in alternatives if each is not str)
    takes_numbers = any(
        typing.get_origin(each) is list and typing.get_args(each)[0] in (int, float) for each in alternatives
    )
    return " or ".join(map(_type_name, alternatives)) + (", such as [4, 2] or 4,2" if takes_numbers else "")


def _listed_type(hint: Any) -> str:
    """Describe a type's values, for a table of options."""
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(map(str, typing.get_args(hint)))
    alternatives = alternatives_of(hint)
    return _type_name(hint) if len(alternatives) == 1 else " | ".join(map(_listed_type, alternatives))


def _is_enumeration(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, enum.Enum)


def _type_name(hint: Any) -> str:
    """Describe a type's values, for a sentence."""
    if _is_enumeration(hint):
        return f"one of: {first_few([str(each.value) for each in hint], _MAX_CHOICES)}"
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(map(_type_name, typing.get_args(hint)))
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    if typing.get_origin(hint) is list:
        return f"a list, each item of it {_type_name(typing.get_args(hint)[0])}"
    if typing.get_origin(hint) is dict:
        value_hint = typing.get_args(hint)[1]
        return "a mapping" + ("" if value_hint is Any else f", each value of it {_type_name(value_hint)}")
    if dataclasses.is_dataclass(hint):
        return f"a mapping with {', '.join(field.name for field in dataclasses.fields(hint))}"
    return _TYPE_NAMES.get(hint, str(hint))

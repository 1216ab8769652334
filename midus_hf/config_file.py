"""Read a dataclass of options from YAML and from `key=value` words, and refuse whatever it does not know."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

Options = TypeVar("Options")


def read_config(cls: type[Options], path: str | Path, overrides: Iterable[str] = ()) -> Options:
    """Read `cls` from a YAML file.

    Args:
        cls: A dataclass; a field may itself be a dataclass, for which a scalar may stand: the value of its first field.
        path: The YAML file, one mapping of keys.
        overrides: Words `key=value`, or `outer.inner=value`, that replace what the file says. Values are YAML.

    Raises:
        ValueError: If the file is absent or no mapping, a key is unknown or missing, or a value has the wrong type.
    """
    values = read_mapping(path)
    for override in overrides:
        _apply_override(cls, values, override)
    return from_mapping(cls, values)


def read_mapping(path: str | Path) -> dict[str, Any]:
    """Read the keys and values of a YAML file; an empty file has none.

    Args:
        path: The file.

    Raises:
        ValueError: If the file is absent, not YAML or no mapping.
    """
    path = Path(path)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"config is {str(path)!r}, which cannot be read ({error.strerror}); give a YAML file."
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"config {str(path)!r} is not YAML: {reason}. Correct it there.") from error
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ValueError(
            f"config {str(path)!r} holds a {type(values).__name__}; expected a mapping of keys to values."
        )
    return values


def from_mapping(cls: type[Options], values: Mapping[str, Any], prefix: str = "") -> Options:
    """Build the dataclass `cls` from a mapping, converting each value to the type of its field.

    Args:
        cls: A dataclass.
        values: Its fields by name.
        prefix: What stands before a key in messages. Default: nothing.

    Raises:
        ValueError: If a key is unknown or missing, or a value has the wrong type.
    """
    fields = _fields(cls)
    for key in values:
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=3, cutoff=0.5)
            hint = (
                f"Did you mean {' or '.join(map(repr, near))}?" if near else f"Expected one of: {', '.join(fields)}."
            )
            raise ValueError(f"config has an unknown key {prefix + str(key)!r}. {hint}")
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise ValueError(
                f"config has no {prefix + name!r}; set it in the file, or as {prefix}{name}=... after it."
            )
    hints = typing.get_type_hints(cls)
    return cls(**{name: _convert(hints[name], value, prefix + name) for name, value in values.items()})


def _apply_override(cls: type, values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ValueError(f"override is {override!r}; expected key=value.")
    *outer, last = key.split(".")
    for name in outer:
        alternatives = _alternatives(typing.get_type_hints(cls).get(name))
        inner_class = next(filter(dataclasses.is_dataclass, alternatives), None)
        inner = values.get(name, {})
        if inner_class is None:
            raise ValueError(f"override is {override!r}, but {name!r} has no keys of its own.")
        if isinstance(inner, list):
            raise ValueError(f"override is {override!r}, but {name!r} is a list; give all of it, as {name}=[...].")
        values[name] = inner if isinstance(inner, dict) else {_first_field(inner_class): inner}
        cls, values = typing.cast(type, inner_class), values[name]
    try:
        values[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"override is {override!r}, whose value is not YAML; quote it.") from error


def _fields(cls: Any) -> dict[str, dataclasses.Field]:
    return {field.name: field for field in dataclasses.fields(cls)}


def _first_field(cls: Any) -> str:
    return next(iter(_fields(cls)))


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def _convert(hint: Any, value: Any, key: str) -> Any:
    """Convert `value` to the first alternative of `hint` that takes it."""
    alternatives = _alternatives(hint)
    for alternative in alternatives:
        if dataclasses.is_dataclass(alternative) and value is not None and not isinstance(value, list):
            mapping = value if isinstance(value, Mapping) else {_first_field(alternative): value}
            return from_mapping(typing.cast(type, alternative), mapping, prefix=f"{key}.")
        if typing.get_origin(alternative) is list and isinstance(value, list):
            (item_hint,) = typing.get_args(alternative)
            return [_convert(item_hint, item, f"{key}[{index}]") for index, item in enumerate(value)]
        if typing.get_origin(alternative) is typing.Literal and value in typing.get_args(alternative):
            return value
        if alternative is types.NoneType and value is None:
            return None
        if alternative in (bool, str, int) and type(value) is alternative:
            return value
        if alternative in (int, float) and (number := _number(value)) is not None:
            if alternative is float or number.is_integer():
                return alternative(number)
    expected = " or ".join(_describe(alternative) for alternative in alternatives)
    raise ValueError(f"{key} is {value!r}; expected {expected}.")


def _number(value: Any) -> float | None:
    """A finite number, also from a string: YAML takes `1e-4`, which has no point, for one."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < float("inf") else None


def _describe(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    if typing.get_origin(hint) is list:
        return f"a list, each item of it {_describe(typing.get_args(hint)[0])}"
    if dataclasses.is_dataclass(hint):
        return f"a mapping with {', '.join(_fields(hint))}"
    names = {types.NoneType: "null", bool: "true or false", str: "a string", int: "a whole number", float: "a number"}
    return names[hint]

"""Read a dataclass of options from YAML and from `key=value` overrides, and refuse unknown keys and wrong types."""

import dataclasses
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from midus_hf.config.options import alternatives_of, read_options

Options = TypeVar("Options")


def read_config(cls: type[Options], path: str | Path, overrides: Iterable[str] = ()) -> Options:
    """Read `cls` from a YAML file.

    Args:
        cls: A dataclass. A field may itself be a dataclass; its value may then be a scalar for its first field.
        path: The YAML file, which holds one mapping.
        overrides: Words that change the file's values, as `apply_words` applies them. Default: none.

    Raises:
        ValueError: If a file is missing or not a mapping; if a key is unknown, missing or present twice; if a value has the wrong
            type; or if an override cannot be applied.
    """
    return from_mapping(cls, apply_words(cls, read_mapping(path), overrides))


def apply_words(cls: type, values: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return the values of a mapping as words of a command line change them, in order.

    Args:
        cls: The dataclass that the mapping will fill.
        values: Values of the dataclass's fields by name.
        overrides: `key=value` or `outer.inner=value`, whose value is YAML, replaces a value, or adds a key to a mapping. The path of
            another YAML file merges its mappings with those before.

    Raises:
        ValueError: If a file is missing or not a mapping, or an override cannot be applied.
    """
    for word in overrides:
        if word.endswith((".yaml", ".yml")) and "=" not in word:
            values = _merged(values, read_mapping(word))
        else:
            _apply_override(cls, values, word)
    return values


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with changes; where both hold a mapping, the two are merged in the same way."""
    merged = dict(values)
    for key, change in changes.items():
        before = merged.get(key)
        merged[key] = _merged(before, change) if isinstance(before, dict) and isinstance(change, dict) else change
    return merged


def read_mapping(path: str | Path) -> dict[str, Any]:
    """Read the mapping in a YAML file. An empty file gives an empty mapping.

    Raises:
        ValueError: If the file is missing, not YAML or not a mapping, or has a key twice.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"config is {str(path)!r}, which cannot be read ({error.strerror}); give a YAML file."
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"config {str(path)!r} is not YAML: {error}. Correct it there.") from error
    values = read_yaml(text, f"config {str(path)!r}")
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ValueError(
            f"config {str(path)!r} holds a {type(values).__name__}; expected a mapping of keys to values."
        )
    return values


def from_mapping(cls: type[Options], values: Mapping[str, Any]) -> Options:
    """Build the dataclass `cls` from a mapping of field names to values, converting each value to the type of its field.

    Raises:
        ValueError: If a key is unknown or missing, or a value has the wrong type.
    """
    return read_options(cls, values, "config", how_to_set="set it in the file, or as {key}=... after it")


def _apply_override(cls: type, values: dict[str, Any], override: str) -> None:
    """Change one value of a mapping.

    Args:
        cls: The dataclass that the mapping will fill.
        values: Values of the dataclass's fields by name; changed in place.
        override: Text `key=value`, see `apply_words`.

    Raises:
        ValueError: If the override has no `=` or no key, is not YAML, or names a key of a value that has no keys.
    """
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ValueError(f"override is {override!r}; expected key=value.")
    kind: Any = cls
    path, (name, rest) = "", _first_key(values, key)
    while rest:
        path = f"{path}.{name}" if path else name
        alternatives = alternatives_of(_hint_within(kind, name))
        inner_class = next(filter(dataclasses.is_dataclass, alternatives), None)
        mapping_hint = next((each for each in alternatives if each is Any or typing.get_origin(each) is dict), None)
        inner = values.get(name, {})
        if inner_class is None and mapping_hint is None:
            raise ValueError(f"override is {override!r}, but {name!r} has no keys of its own.")
        if isinstance(inner, list):
            raise ValueError(f"override is {override!r}, but {name!r} is a list; give all of it, as {path}=[...].")
        if inner_class is not None:
            values[name] = inner if isinstance(inner, dict) else {dataclasses.fields(inner_class)[0].name: inner}
        else:
            if not isinstance(inner, dict | None):
                raise ValueError(
                    f"override is {override!r}, but {name!r} is {inner!r}, which has no name; give all of it, as {path}={{...}}."
                )
            values[name] = inner or {}
        kind, values = inner_class or mapping_hint, values[name]
        name, rest = _first_key(values, rest)
    values[name] = read_yaml(text, f"override {override!r}")


def _first_key(values: Mapping[str, Any], path: str) -> tuple[str, str]:
    """Split a path into its first key and the rest."""
    parts = path.split(
        "."
    )  # names may have dots: the longest key that `values` has is taken, else what stands before the first
    known = [size for size in range(1, len(parts) + 1) if ".".join(parts[:size]) in values]
    size = max(known, default=1)
    return ".".join(parts[:size]), ".".join(parts[size:])


def _hint_within(kind: Any, name: str) -> Any:
    """Return the type hint of a key in a dataclass, a mapping or `Any`; None if a dataclass does not have the key."""
    if dataclasses.is_dataclass(kind):
        return typing.get_type_hints(kind).get(name)
    return typing.get_args(kind)[1] if typing.get_origin(kind) is dict else kind


def read_yaml(text: str, subject: str) -> Any:
    """Parse a YAML text into mappings, lists, strings, numbers, booleans and None.

    Args:
        subject: Words for the text, with which a message begins.

    Raises:
        ValueError: If the text is not YAML, or a mapping has a key twice.
    """
    reader = yaml.SafeLoader(text)
    try:
        document = reader.get_single_node()
        if document is None:
            return None
        # This must come before construction, because construction copies keys of merged mappings (`<<`) into other mappings.
        _refuse_keys_given_twice(reader, document, subject, set())
        return reader.construct_document(document)
    except yaml.YAMLError as error:
        raise ValueError(f"{subject} is not YAML: {_fault(error)}. Correct it there.") from None
    finally:
        reader.dispose()


def _fault(error: yaml.YAMLError) -> str:
    """Return what is wrong with a text and in which line, without the text, which may hold a secret."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    return f"{', '.join(filter(None, (error.context, error.problem)))} in line {error.problem_mark.line + 1}"


def _refuse_keys_given_twice(reader: yaml.SafeLoader, node: yaml.Node, subject: str, seen: set[int]) -> None:
    if id(node) in seen or not isinstance(node, yaml.CollectionNode):
        return
    seen.add(id(node))  # an alias refers to the same node again
    lines: dict[Any, int] = {}
    for child in node.value:
        key_node, value_node = child if isinstance(node, yaml.MappingNode) else (None, child)
        if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
            key = reader.construct_object(key_node)
            line = key_node.start_mark.line + 1
            if key in lines:
                raise ValueError(
                    f"{subject} has {key!r} twice, in lines {lines[key]} and {line}; expected each key once. Leave one out."
                )
            lines[key] = line
        _refuse_keys_given_twice(reader, value_node, subject, seen)

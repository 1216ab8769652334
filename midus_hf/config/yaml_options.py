"""Read a dataclass from YAML files and settings `key=value`; refuse unknown keys and wrong types.

All YAML is read and written here, so that a number or a word means the same in a recipe, a flag and `--set`, at any depth.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from midus_hf.config.errors import RequestError
from midus_hf.config.options import read_options

Options = TypeVar("Options")

_INT, _FLOAT, _STR, _MERGE = (f"tag:yaml.org,2002:{name}" for name in ("int", "float", "str", "merge"))
# Numbers of YAML 1.2, and digits in groups as in Python. YAML 1.1 reads 010 as 8, 1:30 as 90 and 1e-6 as text.
_DIGITS = "[0-9]+(?:_[0-9]+)*"
_NUMBERS = {
    _INT: rf"[-+]?{_DIGITS}|0o[0-7]+|0x[0-9a-fA-F]+",
    _FLOAT: rf"[-+]?(?:\.[0-9]+|{_DIGITS}(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
}
_READ_AS_TEXT = {*_NUMBERS, "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value"}


class _Reader(yaml.SafeLoader):
    """Reader of YAML with numbers of YAML 1.2, whose dates and keys of mappings are text."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _READ_AS_TEXT]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class _Writer(yaml.SafeDumper):
    """Writer of YAML that quotes text which a reader of YAML 1.1 or 1.2 would take for something else."""


for _tag, _pattern in _NUMBERS.items():
    for _kind in (_Reader, _Writer):
        _kind.add_implicit_resolver(_tag, re.compile(f"(?:{_pattern})$"), list("-+.0123456789"))
_Reader.add_constructor(_INT, lambda _, node: int(node.value, 0 if node.value[:2] in ("0o", "0x") else 10))
_Reader.add_constructor(_FLOAT, lambda _, node: float(re.sub(r"\.(?=[in])", "", node.value.lower())))


def options_from_files(cls: type[Options], paths: Iterable[str | Path], settings: Iterable[str] = ()) -> Options:
    """Read `cls` from YAML files, merged key by key, later ones last, and then from settings."""
    values: dict[str, Any] = {}
    for path in paths:
        values = _merged(values, read_mapping(path))
    for key, value in read_settings(settings).items():
        *outer, last = key.split(".")
        inner = values
        for part in outer:
            if inner.get(part) is None:
                inner[part] = {}
            inner = inner[part]
            if not isinstance(inner, dict):
                raise RequestError(
                    f"--set {key} is given, but {part!r} is {inner!r}, which has no keys; expected a mapping. Give all of it."
                )
        inner[last] = value
    return from_mapping(cls, values)


def read_settings(settings: Iterable[str]) -> dict[str, Any]:
    """Return the values of texts `key=value`, as `--set` takes them, by their keys. Values are YAML."""
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        # Names chosen by the user are before a dot.
        key = key.strip() if "." in key else key.strip().replace("-", "_")
        if not equals or not all(key.split(".")):
            raise RequestError(f"--set is {setting!r}; expected key=value.")
        if key in values:
            raise RequestError(f"--set {key} is given twice; expected each key once. Leave one out.")
        values[key] = read_yaml(value, f"--set {setting!r}")
    return values


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for key, change in changes.items():
        before = merged.get(key)
        merged[key] = _merged(before, change) if isinstance(before, dict) and isinstance(change, dict) else change
    return merged


def read_mapping(path: str | Path) -> dict[str, Any]:
    """Read the mapping in a YAML file. An empty file gives an empty mapping."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(
            f"config is {str(path)!r}, which cannot be read ({error.strerror}); give a YAML file."
        ) from error
    except UnicodeDecodeError as error:
        raise RequestError(f"config {str(path)!r} is not YAML: {error}. Correct it there.") from error
    values = read_yaml(text, f"config {str(path)!r}")
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise RequestError(
            f"config {str(path)!r} holds a {type(values).__name__}; expected a mapping of keys to values."
        )
    return values


def from_mapping(cls: type[Options], values: Mapping[str, Any]) -> Options:
    """Build the dataclass `cls` from a mapping of fields to values, converted to the type of the field."""
    return read_options(cls, values, "config", how_to_set="give it")


def read_yaml(text: str, subject: str) -> Any:
    """Parse a YAML text into mappings, lists, strings, numbers, booleans and None."""
    reader = _Reader(text)
    try:
        document = reader.get_single_node()
        if document is None:
            return None
        # This must come before construction, because construction copies keys of merged mappings (`<<`) into other mappings.
        _read_keys(document, subject, set())
        return reader.construct_document(document)
    except RequestError:
        raise
    # A value that its tag does not fit raises one of the last three.
    except (yaml.YAMLError, ValueError, KeyError, AttributeError) as error:
        raise RequestError(f"{subject} is not YAML: {_fault(error)}. Correct it there.") from None
    finally:
        reader.dispose()


def write_yaml(value: Any, flow: bool | None = False) -> str:
    """Return a value as YAML, which `read_yaml` and readers of YAML 1.1 read alike.

    With `flow` it is written within brackets; None: only the innermost mappings and lists are.
    """
    text: str = yaml.dump(value, Dumper=_Writer, default_flow_style=flow, sort_keys=False)
    return text


def _fault(error: Exception) -> str:
    """Return the error of a text and its line, without the text, which may contain a secret."""
    if not isinstance(error, yaml.YAMLError):
        return "it has a tag that its value does not fit, or a number of too many digits"
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    return f"{', '.join(filter(None, (error.context, error.problem)))} in line {error.problem_mark.line + 1}"


def _read_keys(node: yaml.Node, subject: str, seen: set[int]) -> None:
    """Make text of all keys, as a text named no would be named False, and refuse keys given twice."""
    if id(node) in seen or not isinstance(node, yaml.CollectionNode):
        return
    seen.add(id(node))  # an alias refers to the same node again
    lines: dict[Any, int] = {}
    for child in node.value:
        key_node, value_node = child if isinstance(node, yaml.MappingNode) else (None, child)
        if isinstance(key_node, yaml.ScalarNode) and key_node.tag != _MERGE:
            key_node.tag = _STR
            key = key_node.value
            line = key_node.start_mark.line + 1
            if key in lines:
                raise RequestError(
                    f"{subject} has {key!r} twice, in lines {lines[key]} and {line}; expected each key once. Leave one out."
                )
            lines[key] = line
        _read_keys(value_node, subject, seen)

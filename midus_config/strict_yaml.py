"""YAML in which every key is given once: of two values of a key, a plain reader silently takes the last."""

from typing import Any

import yaml


class GivenTwice(ValueError):
    """A key that has two values; the message follows the name of what holds it."""


def read_yaml(text: str) -> Any:
    """Return what a text of YAML holds: mappings, lists, text, numbers, truth values, None.

    Args:
        text: The YAML.

    Raises:
        yaml.YAMLError: If it is no YAML.
        GivenTwice: If a mapping has a key twice.
    """
    reader = yaml.SafeLoader(text)
    try:
        document = reader.get_single_node()
        if document is None:
            return None
        # Before anything is constructed, since merges (`<<`) then put keys of one mapping into others.
        _refuse_keys_given_twice(reader, document, set())
        return reader.construct_document(document)
    finally:
        reader.dispose()


def _refuse_keys_given_twice(reader: yaml.SafeLoader, node: yaml.Node, seen: set[int]) -> None:
    if id(node) in seen or not isinstance(node, yaml.CollectionNode):
        return
    seen.add(id(node))  # an alias comes by again
    values: dict[Any, yaml.Node] = {}
    for child in node.value:
        key_node, value_node = child if isinstance(node, yaml.MappingNode) else (None, child)
        if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
            key = reader.construct_object(key_node)
            if key in values:
                first, second = (
                    f"{_words(each)} in line {each.start_mark.line + 1}" for each in (values[key], value_node)
                )
                raise GivenTwice(f"has {key!r} twice, {first} and {second}; expected each key once. Leave one out.")
            values[key] = value_node
        _refuse_keys_given_twice(reader, value_node, seen)


def _words(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return repr(node.value)
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"

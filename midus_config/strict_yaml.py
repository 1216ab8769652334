"""YAML in which every key is given once: of two values of a key, a plain reader silently takes the last."""

from typing import Any

import yaml


class _Reader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        values: dict[Any, yaml.Node] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node)
            if key in values:
                first, second = (
                    f"{_words(each)} in line {each.start_mark.line + 1}" for each in (values[key], value_node)
                )
                raise GivenTwice(f"has {key!r} twice, {first} and {second}; expected each key once. Leave one out.")
            values[key] = value_node
        return super().construct_mapping(node, deep)


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
    return yaml.load(text, _Reader)


def _words(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return repr(node.value)
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"

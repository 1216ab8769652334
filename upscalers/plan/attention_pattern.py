"""Attention types that runtimes derive from a layer's index: whether a plan keeps them."""

from upscalers.architecture.families import Config, Family
from upscalers.checkpoint.base_model import BaseModel


def keeps_pattern(base: BaseModel) -> bool:
    """Whether the base's layers have the types that its family implies from their index."""
    family = base.family
    return family.layer_types is not None and family.resolved_layer_types(base.config) == family.layer_types(
        base.config
    )


def implying_its_types(family: Family, config: Config) -> Config:
    """The config, with values from which the family implies the types that it lists, where there are such values."""
    if family.layer_types is None or family.layer_types(config) == config["layer_types"]:
        return config
    implying = {**config, **family.implying(config["layer_types"])}
    return implying if family.layer_types(implying) == config["layer_types"] else config


def pattern_concern(base: BaseModel, config: Config, remedy: str) -> str | None:
    """The warning about layers that a runtime misreads if it goes by the index; None where there are none.

    A model with memory has a model type of its own, which no such runtime reads.

    Args:
        base: The base.
        config: The raw config of the result.
        remedy: What helps, a sentence.
    """
    family = base.family
    if config["model_type"] != family.model_type or family.layer_types is None or not keeps_pattern(base):
        return None
    listed, implied = config["layer_types"], family.layer_types(config)
    num_moved = sum(one != other for one, other in zip(listed, implied, strict=True))
    if not num_moved:
        return None
    return (
        f"{num_moved} of {len(listed)} layers attend otherwise (sliding or full) than {family.model_type} implies by their "
        "index. transformers reads layer_types and is right; runtimes that go by the index, such as llama.cpp, compute another "
        f"function. {remedy}"
    )

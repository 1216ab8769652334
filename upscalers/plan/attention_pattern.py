"""What some runtimes derive from a layer's index, and checks of whether a plan keeps that."""

from upscalers.architecture.family import Config, Family
from upscalers.checkpoint.base_model import BaseModel


def keeps_pattern(base: BaseModel) -> bool:
    """Return whether the base's layers have the types that the family implies from their index."""
    family = base.family
    return family.layer_types is not None and family.resolved_layer_types(base.config) == family.layer_types(
        base.config
    )


def implying_its_types(family: Family, config: Config) -> Config:
    """Return the config, changed so that its other values imply the attention types that it lists.

    Return the config unchanged if its values imply the listed types already, or if no values of the family imply them.
    """
    if family.layer_types is None or family.layer_types(config) == config["layer_types"]:
        return config
    implying = {**config, **family.implying(config["layer_types"])}
    return implying if family.layer_types(implying) == config["layer_types"] else config


def pattern_concern(base: BaseModel, config: Config, remedy: str) -> str | None:
    """Return a warning if a runtime that derives attention types from the index would misread the result, else None.

    A model with memory has a model type that no runtime of this kind reads, so the result needs no warning. The sentence
    `remedy` says what helps, and ends the warning.
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

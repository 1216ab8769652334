"""What some runtimes derive from a layer's index or from the number of layers, and checks of whether a plan keeps that."""

from upscalers.architecture.family import Config, Family
from upscalers.checkpoint.base_model import BaseModel

# Numbers of layers by which llama.cpp knows the models of 27 billion parameters: in these it divides attention scores by the
# square root of D / H, in all others by that of d.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}
# `query_pre_attn_scalar` of both families where the config has none.
_QUERY_SCALAR = 256


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


def scale_concern(base: BaseModel, config: Config) -> str | None:
    """Return a warning if llama.cpp would scale attention of the result otherwise than the model does, else None.

    A base that llama.cpp misreads already gets no warning.
    """
    if config["model_type"] not in _LAYERS_OF_27B:
        return None
    scalar = config.get("query_pre_attn_scalar", _QUERY_SCALAR)
    derived = _scalar_of_llama_cpp(base.family, config)
    if _scalar_of_llama_cpp(base.family, base.config) != scalar or derived == scalar:
        return None
    known = _LAYERS_OF_27B[config["model_type"]]
    becomes_known = config["num_hidden_layers"] == known
    return (
        f"llama.cpp would divide attention scores by the square root of {derived} instead of {scalar}, since it tells the model of "
        f"27 billion parameters by its {known} layers. "
        + ("Pass another --num-new-layers." if becomes_known else "Run the result with transformers or vLLM.")
    )


def _scalar_of_llama_cpp(family: Family, config: Config) -> int:
    """Return the number by whose square root llama.cpp divides attention scores."""
    sizes = family.sizes(config)
    of_27b = config["num_hidden_layers"] == _LAYERS_OF_27B[family.model_type]
    return sizes.hidden_size // sizes.num_heads if of_27b else sizes.head_dim

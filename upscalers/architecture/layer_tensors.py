"""Tensors that a model has according to its raw config: tensors of its family, and tensors of its memories."""

from midus_hf.config.memory_entries import NO_MEMORIES, Memories, base_digest, inserted_options, read_memories
from midus_hf.config.memory_types import InsertedOptions
from upscalers.architecture.family import ATTENTION_OUTPUT_ROLES, ATTENTION_ROLES, Config, Family, LayerTensor, Shape
from upscalers.request.errors import refusing_requests


def memories_of(family: Family, config: Config) -> Memories:
    """Return the memories that a model's config lists.

    Raises:
        RequestError: If the config's `memory` list is malformed, or does not fit the model.
    """
    if config.get("memory") in (None, []):
        return NO_MEMORIES
    with refusing_requests():
        return read_memories(config.get("memory"), family.sizes(config), base_digest(config.get("upscale")))


def kept_roles(options: InsertedOptions) -> frozenset[str]:
    """Return the roles of the layer tensors that a block with this memory keeps."""
    return ATTENTION_ROLES | ATTENTION_OUTPUT_ROLES if options.keeps_output_projection else ATTENTION_ROLES


def expected_layer(family: Family, config: Config, memories: Memories, layer: int) -> dict[str, LayerTensor]:
    """Return roles and shapes of a layer's tensors, by their name within the layer.

    Args:
        family: The family of the model.
        config: Raw config of the model.
        memories: The memories of the model.
        layer: Index of the layer, from 0.
    """
    tensors = family.layer_tensors(config, layer)
    entry = memories.inserted.get(layer)
    if entry is not None:
        roles = kept_roles(inserted_options(entry))
        tensors = {name: tensor for name, tensor in tensors.items() if tensor.role in roles}
    of_memories = memories.layer_tensors(layer)
    return tensors | {name: LayerTensor("memory", tensor.shape) for name, tensor in of_memories.items()}


def expected_outer(family: Family, config: Config, memories: Memories) -> dict[str, Shape]:
    """Return the shapes of the tensors outside the layers, by full name: the family's, and tables that layers share."""
    with refusing_requests():
        tables = {f"model.{name}": tensor.shape for name, tensor in memories.table_tensors().items()}
    return family.outer_tensors(config) | tables


def is_embedding(name: str) -> bool:
    """Return whether a tensor outside the layers, by its full name, stands in front of the layers."""
    return "embed" in name

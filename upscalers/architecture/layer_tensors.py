"""Tensors that a model has according to its raw config: tensors of its family, and tensors of its memories."""

from dataclasses import dataclass
from functools import cached_property

from midus_hf.config.memory_entries import NO_MEMORIES, Memories, base_digest, inserted_options, read_memories
from midus_hf.config.memory_types import InsertedOptions
from midus_hf.config.model_sizes import ModelSizes
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


@dataclass(frozen=True)
class Described:
    """Description of a model by its raw config, each part read when it is first used, and once.

    Args:
        family: The family of the model.
        config: Raw config of the model.
    """

    family: Family
    config: Config

    @cached_property
    def sizes(self) -> ModelSizes:
        """Sizes that memories are built for."""
        return self.family.sizes(self.config)

    @cached_property
    def memories(self) -> Memories:
        """Memories that the config lists."""
        return memories_of(self.family, self.config)

    @cached_property
    def backbone_layers(self) -> list[dict[str, LayerTensor]]:
        """Roles and shapes of each layer's tensors as the family has them, by their name within the layer."""
        return self.family.layers(self.config)

    @cached_property
    def layers(self) -> list[dict[str, LayerTensor]]:
        """Roles and shapes of each layer's tensors, memories' included, by their name within the layer."""
        layers, inserted = [], self.memories.inserted
        for layer, tensors in enumerate(self.backbone_layers):
            if layer in inserted:
                roles = kept_roles(inserted_options(inserted[layer]))
                tensors = {name: tensor for name, tensor in tensors.items() if tensor.role in roles}
            if self.memories.entries:
                memory_tensors = self.memories.layer_tensors(layer)
                tensors = tensors | {
                    name: LayerTensor("memory", tensor.shape) for name, tensor in memory_tensors.items()
                }
            layers.append(tensors)
        return layers

    @cached_property
    def outer(self) -> dict[str, Shape]:
        """Shapes of the tensors outside the layers, by full name: the family's, and tables that layers share."""
        with refusing_requests():
            tables = {f"model.{name}": tensor.shape for name, tensor in self.memories.table_tensors().items()}
        return self.family.outer_tensors(self.config) | tables


def is_embedding(name: str) -> bool:
    """Return whether a tensor outside the layers, by its full name, stands in front of the layers."""
    return "embed" in name

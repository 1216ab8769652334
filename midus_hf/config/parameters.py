"""Count the parameters of a model from its config alone."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from midus_hf.config.backbone import Backbone, read_backbone
from midus_hf.config.declared_tensors import DeclaredTensor
from midus_hf.config.flops.rules import values_read
from midus_hf.config.memory_entries import inserted_options, read_memories


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters by the part of the model. A tied matrix counts once.

    Args:
        backbone: Parameters outside memories.
        values: Parameters of memories with the role `value`, which are what memories retrieve.
        memory: All other parameters of memories.
        embeddings: The part of `backbone` in the embedding of tokens and, unless it is tied, in the language head.
        read: Elements of values that one token reads, summed over layers: a row that several layers share counts for
            each layer.
    """

    backbone: int
    values: int
    memory: int
    embeddings: int
    read: int

    @property
    def total(self) -> int:
        """Number of all parameters."""
        return self.backbone + self.values + self.memory

    @property
    def activated(self) -> int:
        """Number of parameters that one token uses: all parameters but the values that the token does not read."""
        return self.backbone + self.memory + self.read


def count_parameters(config: Mapping[str, Any]) -> ParameterCounts:
    """Count the parameters of a model.

    Args:
        config: The raw `config.json`.

    Raises:
        ValueError: If `read_backbone` or `read_memories` refuses the config.
    """
    backbone = read_backbone(config)
    sizes = backbone.sizes
    memories = read_memories(config.get("memory"), sizes)
    embeddings = backbone.vocabulary * sizes.hidden_size * (1 if backbone.tied else 2)
    outside = embeddings + sizes.hidden_size
    layers = 0
    for layer in range(sizes.num_layers):
        entry = memories.inserted.get(layer)
        keeps_output = entry is None or inserted_options(entry).keeps_output_projection
        layers += _attention(backbone, keeps_output) + (_feed_forward(backbone) if entry is None else 0)
    values, memory, read = 0, 0, 0
    for entry in memories.entries:
        tensors = [tensor for layer in entry.layers for tensor in entry.tensors_at(layer, sizes).values()]
        if entry.is_attached:
            tensors += [tensor for tables in memories.tables(entry.name) for tensor in tables.tensors.values()]
        num_values = _numbers(tensor for tensor in tensors if tensor.role == "value")
        read_per_token = values_read(entry.options, sizes)
        values += num_values
        memory += _numbers(tensor for tensor in tensors if tensor.role not in ("value", "buffer"))
        read += num_values if read_per_token is None else read_per_token * len(entry.layers)
    return ParameterCounts(outside + layers, values, memory, embeddings, read)


def _attention(backbone: Backbone, keeps_output: bool) -> int:
    """Count the parameters of attention and its norms, with or without the output projection and the norm that follows it."""
    hidden, query, key, d = (
        backbone.sizes.hidden_size,
        backbone.query_width,
        backbone.key_width,
        backbone.sizes.head_dim,
    )
    count = hidden * (query + 2 * key) + (query + 2 * key if backbone.attention_bias else 0)
    count += {"head": 2 * d, "whole": query + key, None: 0}[backbone.traits.query_key_norm]
    count += hidden if backbone.traits.input_norms else 0
    if keeps_output:
        count += query * hidden + (hidden if backbone.output_bias else 0)
        count += hidden if backbone.traits.output_norms else 0
    return count


def _feed_forward(backbone: Backbone) -> int:
    """Count the parameters of a feed-forward network and its norms."""
    hidden, inner = backbone.sizes.hidden_size, backbone.sizes.intermediate_size
    norms = backbone.traits.input_norms + backbone.traits.output_norms
    return 3 * hidden * inner + (2 * inner + hidden if backbone.mlp_bias else 0) + norms * hidden


def _numbers(tensors: Iterable[DeclaredTensor]) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors)

"""Sites at which memories add to what a layer computes, or change what its attention and its feed-forward network compute."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from midus_hf.config.memory_entries import Memories
from midus_hf.memory.needs import SITES, LayerCall, Site, first_of, register, with_first
from midus_hf.models.adapted import Adapter, HeadReaders, note_rotation
from midus_hf.models.memory_inputs import Carried, skips_into


class InsideAttention(Site):
    """Memories that change what the layer's attention computes."""

    name = "inside-attention"

    def __init__(self, layer: Any, config: Any, memories: Memories):
        layer.mixer_part.__class__ = layer.attention_class

    @staticmethod
    def is_missing(layer: Any) -> bool:
        """Return whether the layer has another attention than the family's."""
        return layer.lacks_attention


def with_adapters(site: str, layer: Any, part: str, call: LayerCall) -> Callable[..., Any]:
    """Return a part of the layer that runs with the adapters that the memories at a site have for its projections."""
    adapters: dict[str, Adapter] = {}  # by the role of the projection
    for name in layer.at(site, call.memory_inputs):
        inputs = layer.inputs_of(name, call.memory_inputs)
        for role in layer.classes[name].projections:
            adapters[role] = _after(adapters.get(role), layer.memories[name], role, inputs)
    return partial(getattr(layer, part), adapters=adapters)


def _after(first: Adapter | None, memory: Any, role: str, inputs: Mapping[str, Any]) -> Adapter:
    """Return a memory's adapter of a projection, which runs after the adapter `first`, if there is one."""

    def adapter(read: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        output = output if first is None else first(read, output)
        return memory(read, output, projection=role, **inputs)

    return adapter


@register(SITES, "attention-adapters")
class AttentionAdapters(InsideAttention):
    """Memories that change the outputs of projections of attention."""

    def stand(self, layer: Any, call: LayerCall) -> None:
        """Let the layer's attention run with adapted projections."""
        layer.replaced[layer.mixer_name] = with_adapters(self.name, layer, layer.mixer_name, call)


@register(SITES, "attention-heads")
class AttentionHeads(InsideAttention):
    """Memories that change the output of attention heads."""

    def __init__(self, layer: Any, config: Any, memories: Memories):
        super().__init__(layer, config, memories)
        note_rotation(layer)

    def stand(self, layer: Any, call: LayerCall) -> None:
        """Let memories change the output of the heads, one after another."""
        readers = [
            (
                partial(layer.memories[name], **layer.inputs_of(name, call.memory_inputs)),
                layer.classes[name].wants_unrotated,
            )
            for name in layer.at(self.name, call.memory_inputs)
            if layer.classes[name].reads_heads
        ]
        if readers:
            attention = getattr(layer, layer.mixer_name)
            layer.replaced[layer.mixer_name] = partial(attention, readers=HeadReaders(readers))


@register(SITES, "behind-attention")
class BehindAttention(Site):
    """Memories that add to the residual stream behind attention."""

    name = "behind-attention"

    @staticmethod
    def is_missing(layer: Any) -> bool:
        """Return whether the layer has no mixer, or does not add its output to the residual stream."""
        return not layer.mixer_name or not layer.adds_mixer

    def stand(self, layer: Any, call: LayerCall) -> None:
        """Put memories behind the last part before the mixer's output is added to the residual stream."""
        name = layer.attention_output_norm or layer.mixer_name
        layer.replaced[name] = partial(self._add, layer, call, getattr(layer, name))

    def _add(self, layer: Any, call: LayerCall, part: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the part, and add what memories read from the sum of its output and the layer's input."""
        output = part(*args, **kwargs)
        added = first_of(output)
        return with_first(output, layer.with_added(self.name, added, call.entered + added, call.memory_inputs))


@register(SITES, "inside-ffn")
class FeedForwardAdapters(Site):
    """Memories that change the outputs of projections of the feed-forward network."""

    name = "inside-ffn"

    def __init__(self, layer: Any, config: Any, memories: Memories):
        layer.feed_forward_part.__class__ = layer.mlp_class

    @staticmethod
    def is_missing(layer: Any) -> bool:
        """Return whether the layer has another feed-forward network than the family's dense one."""
        return layer.mlp_class is None or not isinstance(layer.feed_forward_part, layer.mlp_class.family_class)

    def stand(self, layer: Any, call: LayerCall) -> None:
        """Let the feed-forward network run with adapted projections."""
        layer.replaced[layer.feed_forward_name] = with_adapters(self.name, layer, layer.feed_forward_name, call)


@register(SITES, "beside-ffn")
class BesideFeedForward(Site):
    """Memories that add to the output of the feed-forward network."""

    name = "beside-ffn"

    @staticmethod
    def is_missing(layer: Any) -> bool:
        """Return whether the layer has no feed-forward network."""
        return layer.feed_forward_part is None

    def stand(self, layer: Any, call: LayerCall) -> None:
        """Put memories beside the feed-forward network."""
        name = layer.feed_forward_name
        layer.replaced[name] = partial(self._add, layer, call, getattr(layer, name))

    def _add(
        self, layer: Any, call: LayerCall, network: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the network, and add what memories read from its input."""
        output = network(hidden_states, *args, **kwargs)
        # Some networks of experts return all tokens in one dimension.
        computed = first_of(output).view_as(hidden_states)
        return with_first(output, layer.with_added(self.name, computed, hidden_states, call.memory_inputs))


@register(SITES, "skip")
class Skip(Site):
    """Memories that read the input of the layer's feed-forward network, or whose results are added behind the layer."""

    name = "skip"

    def __init__(self, layer: Any, config: Any, memories: Memories):
        self._added = tuple(
            Carried(entry.name, read)
            for entry in memories.attached.values()
            for read in skips_into(entry, layer.layer_idx)
        )

    @staticmethod
    def is_behind(layer: int, memories: Memories) -> bool:
        """Return whether a memory adds its results behind a layer."""
        return any(skips_into(entry, layer) for entry in memories.attached.values())

    @staticmethod
    def is_missing(layer: Any) -> bool:
        """Return whether a layer at which a memory reads has no feed-forward network."""
        return "skip" in layer.sites.values() and layer.feed_forward_part is None

    def stand(self, layer: Any, call: LayerCall) -> None:
        """Let memories read the input of the feed-forward network."""
        if "skip" in layer.sites.values():
            name = layer.feed_forward_name
            layer.replaced[name] = partial(self._read, layer, call, getattr(layer, name))

    def _read(
        self, layer: Any, call: LayerCall, network: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        output = network(hidden_states, *args, **kwargs)
        for name in layer.at("skip", call.memory_inputs):
            call.carried[Carried(name, layer.layer_idx)] = layer.read(name, hidden_states, call.memory_inputs)
        return output

    def behind(self, layer: Any, output: Any, call: LayerCall) -> Any:
        """Add the results of memories that read at this layer or an earlier one."""
        for skip in self._added:
            added = call.carried.get(skip)
            if added is not None:  # None if the memory had nothing to do
                output = with_first(output, first_of(output) + added.to(call.entered.dtype))
        return output


@register(SITES, "behind-layer")
class BehindLayer(Site):
    """Memories that add to the residual stream behind the layer."""

    name = "behind-layer"

    def behind(self, layer: Any, output: Any, call: LayerCall) -> Any:
        """Add what memories read from the layer's output."""
        stream = first_of(output)
        return with_first(output, layer.with_added(self.name, stream, stream, call.memory_inputs))

"""A layer's part in attention over the depth: the slots that it reads, and the slots that it writes for later layers."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from midus_hf.config.memories.depth_attention import DepthAttentionOptions, Slot, SlotSource
from midus_hf.config.memory_entries import Memories, MemoryEntry, memories_of
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.memory.needs import LayerCall, Site, mixin_for, register_site
from midus_hf.memory.registry import MemoryModule
from midus_hf.memory.sequence_heads import SequenceHeads, require_log_sum_exp
from midus_hf.models.adapted import (
    Adapter,
    HeadChange,
    Rotation,
    View,
    note_rotation,
    rotated,
    take_over_attention,
    unrotated,
)
from midus_hf.models.memory_inputs import Carried
from midus_hf.models.parts import CACHE

# A key and a value per key/value head and token, both `[B, K, T, d]`.
Heads = tuple[torch.Tensor, torch.Tensor]


@register_site("depth")
class DepthHeads(Site):
    """Slots that a layer reads and writes in every pass.

    A slot and the queries that read the slot have the same position, so equal rotations of both cancel out. If layers of one
    memory rotate by different angles (Gemma 3), or some layers do not rotate (SmolLM3), slots and the queries that read them are
    left unrotated.

    Args:
        layer: The host layer, whose memories are built.
        config: Config of the model.
        memories: Memories of the model.
    """

    name = "inside-attention"

    def __init__(self, layer: Any, config: Any, memories: Memories):
        take_over_attention(layer)
        note_rotation(layer)
        entry = next(entry for entry in memories.attached_to(layer.layer_idx) if entry.options.attends)
        assert isinstance(entry.options, DepthAttentionOptions), "memories that attend have slots"
        self.memory, self.options, self.layers = entry.name, entry.options, entry.layers
        self.index = entry.layers.index(layer.layer_idx)
        self.slots = tuple(
            (self._carried(slot.writer, slot.source, "key"), self._carried(slot.writer, slot.source, "value"))
            for slot in self.options.slots_read(self.index)
        )
        self.writes = tuple(
            source
            for source in self.options.sources
            if self.options.is_read(Slot(self.index, source), len(self.layers))
        )
        self.without_rotation = self.options.rope == "same" and (
            layer.some_do_not_rotate or _rotations_differ(config, entry.layers)
        )

    @staticmethod
    def is_needed(entry: MemoryEntry, memory: MemoryModule, sizes: ModelSizes) -> bool:
        """Return whether the memory is attention over the depth."""
        return entry.is_attached and entry.options.attends

    @staticmethod
    def is_missing(layer: Any) -> bool:
        """Return whether the layer has another attention than the family's."""
        return layer.lacks_attention

    def stand(self, layer: Any, parts: dict[str, Any], call: LayerCall) -> None:
        """Let heads read slots, and write slots behind the feed-forward network."""
        if self.memory not in layer.at(self.name, call.memory_inputs):
            return
        depth = self.begin(layer, call.carried, call.rotation)
        name = layer.mixer_name
        attention = partial(parts.get(name, getattr(layer, name)), depth=depth)
        parts[name] = partial(_noting_input, depth, attention)
        name = layer.feed_forward_name
        assert name is not None, "check_layers has refused a layer without a feed-forward network"
        parts[name] = partial(_writing, depth, call.carried, parts.get(name, layer.feed_forward_part))

    def _carried(self, index: int, source: SlotSource, part: str) -> Carried:
        return Carried(self.memory, self.layers[index], f"{source}_{part}")

    def begin(self, layer: Any, carried: Mapping[Carried, Any], rotation: Rotation | None) -> "DepthPass":
        """Begin a pass through the layer.

        Args:
            layer: The host layer.
            carried: Tensors that the layer takes from earlier layers.
            rotation: Cosines and sines of the pass at this layer.
        """
        return DepthPass(self, layer, carried, rotation)

    def key_of(self, source: SlotSource) -> Carried:
        """Return the name under which later layers find the key that this layer writes to a slot."""
        return self._carried(self.index, source, "key")

    def value_of(self, source: SlotSource) -> Carried:
        """Return the name under which later layers find the value that this layer writes to a slot."""
        return self._carried(self.index, source, "value")


class DepthPass(HeadChange):
    """One pass through a layer that takes part in attention over the depth.

    Args:
        heads: Slots that the layer reads and writes.
        layer: The host layer.
        carried: Tensors that the layer takes from earlier layers.
        rotation: Cosines and sines of the pass at this layer.
    """

    def __init__(self, heads: DepthHeads, layer: Any, carried: Mapping[Carried, Any], rotation: Rotation | None):
        self._heads, self._layer, self._carried, self._rotation = heads, layer, carried, rotation
        self._memory, self._attention = layer.memories[heads.memory], getattr(layer, layer.mixer_name)
        self._input: torch.Tensor | None = None
        self._raw_key: torch.Tensor | None = None
        self._own: Heads | None = None
        self._keys_are_new = True

    @property
    def _reuses(self) -> bool:
        return self._heads.options.attention_slots == "reused" and "attention" in self._heads.writes

    @property
    def _reads_raw_key(self) -> bool:
        """True if later layers read the output of the key projection, before norm and rotation."""
        return self._reuses and self._heads.options.rope == "released"

    def note_input(self, hidden_states: torch.Tensor) -> None:
        """Take the input of attention, `[B, T, D]`."""
        self._input = hidden_states

    def begin(self, attention: Any, adapters: Mapping[str, Adapter], kwargs: dict[str, Any]) -> Mapping[str, Adapter]:
        """Note the keys and values of the tokens of the pass, if later layers read them."""
        cache = kwargs.get(CACHE)
        self._keys_are_new = cache is None
        if self._reuses and cache is not None:
            kwargs[CACHE] = View(cache, {"update": partial(self._noting_update, cache.update)})
        if self._reads_raw_key:
            return {**adapters, "key": partial(self._noting_key, adapters.get("key"))}
        return adapters

    def _noting_key(self, adapter: Adapter | None, read: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Return the output of the key projection, `[B, T, K * d]`, as changed by `adapter`, and note it."""
        self._raw_key = output if adapter is None else adapter(read, output)
        return self._raw_key

    def _noting_update(
        self, update: Callable[..., Any], key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Update the cache, and note the rotated keys and the values, each `[B, K, T, d]`."""
        self._own = (key, value)
        return update(key, value, *args, **kwargs)

    def attend(self, own: Callable[..., Any], module: Any, *heads: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        """Attend to the sequence, and to the slots of the depth if the layer reads any."""
        query, key, value, mask = heads
        if self._reuses and self._keys_are_new:
            self._own = (key, value)
        if not self._heads.slots:
            return own(module, query, key, value, mask, **kwargs)
        implementation = module.own_config._attn_implementation
        return self._attend_to_slots(SequenceHeads(module, own, implementation, query, key, value, mask, kwargs))

    def _attend_to_slots(self, sequence: SequenceHeads) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend to the sequence and to the slots of the depth.

        Returns:
            The output of the heads, `[B, T, H, d]`, and attention weights to the sequence alone, if they are known.
        """
        heads = self._heads
        keys = [self._carried[key] for key, _ in heads.slots]
        values = [self._carried[value] for _, value in heads.slots]
        query = sequence.query
        if heads.options.rope == "released":
            keys = [normalised_keys(self._attention, key) for key in keys]
        elif heads.without_rotation:
            query = unrotated(self._attention, query, self._rotation)
        return self._memory(query, sequence=sequence, keys=keys, values=values)

    def written(self, mlp_input: torch.Tensor) -> dict[Carried, torch.Tensor | None]:
        """Return the slots that the layer writes, by the names under which they are carried.

        Args:
            mlp_input: `[B, T, D]`, the input of the feed-forward network.
        """
        written: dict[Carried, torch.Tensor | None] = {}
        for source in self._heads.writes:
            if source == "attention" and self._reuses:
                key, value = self._own_heads()
            else:
                read = self._input if source == "attention" else mlp_input
                assert read is not None, "attention tells its input before the feed-forward network runs"
                key, value = self._projected(source, read)
            written |= {self._heads.key_of(source): key, self._heads.value_of(source): value}
        return written

    def _own_heads(self) -> Heads:
        assert self._own is not None, "attention tells which keys and values it wrote"
        key, value = self._own
        if self._reads_raw_key:
            assert self._raw_key is not None, "attention tells what its key projection gave"
            return _split(self._raw_key, value), value
        return unrotated(self._attention, key, self._rotation) if self._heads.without_rotation else key, value

    def _projected(self, source: SlotSource, read: torch.Tensor) -> Heads:
        key, value = self._memory(read, slot=source)  # [B, K, T, d]
        if self._heads.options.rope == "same":
            key = normalised_keys(self._attention, key)
            key = key if self._heads.without_rotation else rotated(self._attention, key, self._rotation)
        return key, value


def _noting_input(depth: DepthPass, attention: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
    """Run attention, and note its input."""
    depth.note_input(hidden_states)
    return attention(hidden_states, **kwargs)


def _writing(
    depth: DepthPass,
    carried: dict[Carried, torch.Tensor | None],
    network: Any,
    hidden_states: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run the feed-forward network, and write the slots that later layers read."""
    output = network(hidden_states, *args, **kwargs)
    carried |= depth.written(hidden_states)
    return output


@mixin_for("depth")
class NeedsLogSumExp:
    """Mixin for a model whose heads read the depth, which not every implementation of attention allows."""

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        """Check the implementation as the family does; called when a model is made and when its attention is set."""
        model: Any = self
        if any(entry.options.attends for entry in memories_of(model.config).entries):
            require_log_sum_exp(attn_implementation)
        adjusted: str = super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)
        return adjusted


def normalised_keys(attention: Any, keys: torch.Tensor) -> torch.Tensor:
    """Apply the key norm of a family's attention, if there is one, to keys `[B, K, T, d]`: per head (Qwen 3, Gemma 3, nanochat), or
    over all heads together (OLMo 2)."""
    norm = getattr(attention, "k_norm", None)
    if norm is None:
        return keys
    weight = getattr(norm, "weight", None)
    if weight is None or weight.shape[-1] == keys.shape[-1]:
        return norm(keys)
    return _split(norm(keys.transpose(1, 2).flatten(2)), keys)


def _split(keys: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Reshape keys `[B, T, K * d]` to `[B, K, T, d]`."""
    return keys.unflatten(-1, (like.shape[1], like.shape[-1])).transpose(1, 2)


def _rotations_differ(config: Any, layers: tuple[int, ...]) -> bool:
    """Return whether layers rotate by different angles, as sliding and full layers of Gemma 3 do."""
    kinds = getattr(config, "layer_types", None)
    parameters = getattr(config, "rope_parameters", None) or {}
    if kinds is None or not all(kind in parameters for kind in kinds):
        return False
    return len({kinds[layer] for layer in layers}) > 1

"""A layer's part in attention over the depth: the slots that it reads, and the slots that it writes for later layers."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from midus_hf.config.memories.depth_attention import DepthAttentionOptions, Slot, SlotSource
from midus_hf.config.memory_entries import Memories, MemoryEntry, memories_of
from midus_hf.memory.needs import SITES, LayerCall, mixin_for, register
from midus_hf.memory.sequence_heads import SequenceHeads, require_log_sum_exp
from midus_hf.models.adapted import (
    Adapter,
    HeadChange,
    View,
    note_rotation,
    rotated,
    unrotated,
)
from midus_hf.models.memory_inputs import Carried
from midus_hf.models.parts import CACHE
from midus_hf.models.sites import InsideAttention

# A key and a value per key/value head and token, both `[B, K, T, d]`.
Heads = tuple[torch.Tensor, torch.Tensor]


@register(SITES, "depth")
class DepthHeads(InsideAttention):
    """Slots that a layer reads and writes in every pass.

    A slot and the queries that read the slot have the same position, so equal rotations of both cancel out. If layers of one
    memory rotate by different angles (Gemma 3), or some layers do not rotate (SmolLM3), slots and the queries that read them are
    left unrotated.

    Args:
        layer: The host layer, whose memories are built.
        config: Config of the model.
        memories: Memories of the model.
    """

    def __init__(self, layer: Any, config: Any, memories: Memories):
        super().__init__(layer, config, memories)
        note_rotation(layer)
        entry = next(entry for entry in memories.attached_to(layer.layer_idx) if entry.options.attends)
        assert isinstance(entry.options, DepthAttentionOptions), "memories that attend have slots"
        self.memory, self.options = entry.name, entry.options
        self.layers, self.index = entry.layers, entry.layers.index(layer.layer_idx)
        # Where the key and the value of each slot are carried: of slots that the layer reads, from the oldest to the newest, and of
        # slots that it writes and later layers read, by their source.
        self.slots = tuple(_carried(entry, slot) for slot in self.options.slots_read(self.index))
        own = self.options.sources if self.index + 1 < len(entry.layers) else ()
        self.writes = {source: _carried(entry, Slot(self.index, source)) for source in own}
        self.without_rotation = layer.some_do_not_rotate or _rotations_differ(config, entry.layers)

    def stand(self, layer: Any, call: LayerCall) -> None:
        """Let heads read slots, and write slots behind the feed-forward network."""
        if self.memory in layer.at(self.name, call.memory_inputs):
            depth = DepthPass(self, layer, call)
            for name, run in ((layer.mixer_name, depth.attention), (layer.feed_forward_name, depth.feed_forward)):
                layer.replaced[name] = partial(run, getattr(layer, name))


def _carried(entry: MemoryEntry, slot: Slot) -> tuple[Carried, Carried]:
    layer = entry.layers[slot.writer]
    return Carried(entry.name, layer, f"{slot.source}_key"), Carried(entry.name, layer, f"{slot.source}_value")


class DepthPass(HeadChange):
    """One pass through a layer that takes part in attention over the depth.

    Args:
        heads: Slots that the layer reads and writes.
        layer: The host layer.
        call: The call of the layer.
    """

    def __init__(self, heads: DepthHeads, layer: Any, call: LayerCall):
        self._heads = heads
        self._memory, self._attention = layer.memories[heads.memory], layer.mixer_part
        self._slots, self._rotation = call.carried, call.rotation
        # Whether later layers read the keys and values that attention computes.
        self._reuses = heads.options.attention_slots == "reused" and "attention" in heads.writes
        # What attention reads, `[B, T, D]`; its keys and values, without those of the cache.
        self._input: torch.Tensor | None = None
        self._own: Heads | None = None

    def attention(self, attention: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        """Run attention, whose heads read the depth, and note its input."""
        self._input = hidden_states
        return attention(hidden_states, depth=self, **kwargs)

    def feed_forward(self, network: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the feed-forward network, and write the slots that later layers read."""
        output = network(hidden_states, *args, **kwargs)
        for source, (key, value) in self._heads.writes.items():
            if source == "attention" and self._reuses:
                written = self._own_heads()
            else:
                read = self._input if source == "attention" else hidden_states
                assert read is not None, "attention runs before the feed-forward network"
                written = self._projected(source, read)
            self._slots[key], self._slots[value] = written
        return output

    def begin(self, attention: Any, adapters: Mapping[str, Adapter], kwargs: dict[str, Any]) -> Mapping[str, Adapter]:
        """Note the keys and values of the tokens of the pass, if later layers read them."""
        cache = kwargs.get(CACHE)
        if self._reuses and cache is not None:
            kwargs[CACHE] = View(cache, {"update": partial(self._noting_update, cache.update)})
        return adapters

    def _noting_update(
        self, update: Callable[..., Any], key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Update the cache, and note the rotated keys and the values, each `[B, K, T, d]`."""
        self._own = (key, value)
        return update(key, value, *args, **kwargs)

    def attend(self, own: Callable[..., Any], module: Any, *heads: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        """Attend to the sequence, and to the slots of the depth if the layer reads any.

        Returns:
            The output of the heads, `[B, T, H, d]`, and attention weights to the sequence alone, if they are known.
        """
        query, key, value, mask = heads
        if self._own is None:  # no cache was updated
            self._own = (key, value)
        if not self._heads.slots:
            return own(module, query, key, value, mask, **kwargs)
        implementation = module.own_config._attn_implementation
        sequence = SequenceHeads(module, own, implementation, query, key, value, mask, kwargs)
        keys, values = ([self._slots[each] for each in carried] for carried in zip(*self._heads.slots, strict=True))
        if self._heads.without_rotation:
            query = unrotated(self._attention, query, self._rotation)
        return self._memory(query, sequence=sequence, keys=keys, values=values)

    def _own_heads(self) -> Heads:
        assert self._own is not None, "attention tells which keys and values it wrote"
        key, value = self._own
        return unrotated(self._attention, key, self._rotation) if self._heads.without_rotation else key, value

    def _projected(self, source: SlotSource, read: torch.Tensor) -> Heads:
        key, value = self._memory(read, slot=source)  # [B, K, T, d]
        key = normalised_keys(self._attention, key)
        return key if self._heads.without_rotation else rotated(self._attention, key, self._rotation), value


@mixin_for("depth")
class NeedsLogSumExp:
    """Mixin for a model whose heads read the depth, which not every implementation of attention allows."""

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        """Check the implementation as the family does; called when a model is made and when its attention is set."""
        model: Any = self
        attends = any(entry.options.attends for entry in memories_of(model.config).entries)
        if (
            attends and (attn_implementation or "").removeprefix("paged|") in ALL_ATTENTION_FUNCTIONS
        ):  # others the family refuses
            require_log_sum_exp(attn_implementation)
        adjusted: str = super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)
        if attends:
            require_log_sum_exp(adjusted)
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

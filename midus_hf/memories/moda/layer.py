"""Heads that also read earlier layers at their own position (Mixture-of-Depths Attention, section 2)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from midus_hf.config.declared_tensors import ModelSizes
from midus_hf.memories.hosting.heads import (
    Attention,
    AttentionFunction,
    HeadsOutput,
    SequenceHeads,
    get_attention_host,
    require_log_sum_exp,
    rotated,
    unrotated,
)
from midus_hf.memories.hosting.layer import HostLayer, LayerCall, hidden_states_argument
from midus_hf.memories.hosting.parts import CACHE, KEY_NORMS, Arguments, CarriedKey, Keywords, PartOutput
from midus_hf.memories.hosting.sites import InsideAttention
from midus_hf.memories.moda.options import ModaOptions, Slot, SlotSource
from midus_hf.memories.module import MemoryModule
from midus_hf.memories.registry import Memories, MemoryEntry, register_layer
from midus_hf.ops.moda.op import depth_attention, join_factors, joint_attention

Heads = tuple[torch.Tensor, torch.Tensor]


class ModaSite(InsideAttention):
    """Slots that a layer reads and writes in every pass.

    A slot and the queries that read it have the same position, so equal rotations cancel out. If layers of one memory rotate by
    different angles (Gemma 3), or some do not rotate (SmolLM3), slots and these queries are left unrotated.
    """

    def __init__(self, layer: HostLayer, config: PreTrainedConfig, memories: Memories):
        super().__init__(layer, config, memories)
        entry = next(entry for entry in memories.attached_to(layer.layer_idx) if entry.options.attends)
        assert isinstance(entry.options, ModaOptions), "memories that attend have slots"
        self.memory, self.options = entry.name, entry.options
        self.layers, self.index = entry.layers, entry.layers.index(layer.layer_idx)
        self.slots = tuple(_carried(entry, slot) for slot in self.options.slots_read(self.index))
        own = self.options.sources if self.index + 1 < len(entry.layers) else ()
        self.writes = {source: _carried(entry, Slot(self.index, source)) for source in own}
        self.without_rotation = layer.some_do_not_rotate or _rotations_differ(config, entry.layers)
        self.reuses = self.options.attention_slots == "reused" and "attention" in self.writes
        self.hook(layer.mixer_name, self.note_input, before=True)
        # Other memories change what heads make of the sequence and the depth.
        get_attention_host(layer).changes.insert(0, self)
        self.hook(str(layer.feed_forward_name), self.write_slots)

    @property
    def is_active(self) -> bool:
        """True if the memory has something to do in the call of the layer that runs now."""
        return self.memory in self.layer.at(self.name, self.layer.call.memory_inputs)

    def note_input(self, attention: nn.Module, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords] | None:
        """Record attention's input, and the pass's keys and values, if later layers read them."""
        if not self.is_active:
            return None
        self.layer.call.attention_input = hidden_states_argument(args, kwargs)
        cache = kwargs.get(CACHE)
        if not self.reuses or cache is None:
            return None
        return args, {**kwargs, CACHE: _NotingCache(cache, self.layer.call)}

    def write_slots(self, network: nn.Module, args: Arguments, kwargs: Keywords, output: PartOutput) -> None:
        """Write the slots that later layers read, after the feed-forward network."""
        if not self.is_active:
            return
        call = self.layer.call
        for source, (key, value) in self.writes.items():
            if source == "attention" and self.reuses:
                assert call.own_heads is not None, "attention records which keys and values it wrote"
                written = call.own_heads
                if self.without_rotation:
                    written = unrotated(self.layer.mixer_part, written[0], call.rotation), written[1]
            else:
                read = call.attention_input if source == "attention" else hidden_states_argument(args, kwargs)
                assert read is not None, "attention runs before the feed-forward network"
                written = self._projected(source, read)
            call.carried[key], call.carried[value] = written

    def attend(
        self, attention_function: AttentionFunction, module: Attention, *heads: Any, **kwargs: object
    ) -> HeadsOutput:
        """Attend to the sequence, and to slots of the depth if the layer reads any (`ModaMemory.attend`)."""
        query, key, value, mask = heads
        if not self.is_active:
            return attention_function(module, query, key, value, mask, **kwargs)
        call = self.layer.call
        if call.own_heads is None:  # no cache was updated
            call.own_heads = key, value
        if not self.slots:
            return attention_function(module, query, key, value, mask, **kwargs)
        implementation = module.config.config._attn_implementation
        sequence = SequenceHeads(module, attention_function, implementation, query, key, value, mask, kwargs)
        keys, values = ([call.carried[each] for each in carried] for carried in zip(*self.slots, strict=True))
        if self.without_rotation:
            query = unrotated(module, query, call.rotation)
        return self.layer.memories[self.memory](query, sequence=sequence, keys=keys, values=values)

    def _projected(self, source: SlotSource, read: torch.Tensor) -> Heads:
        attention = self.layer.mixer_part
        key, value = self.layer.memories[self.memory](read, slot=source)  # [B, K, T, d]
        key, norm = normalised_keys(attention, key), getattr(attention, "v_norm", None)
        value = value if norm is None else norm(value)  # of each head (Gemma 4)
        return key if self.without_rotation else rotated(attention, key, self.layer.call.rotation), value


class _NotingCache:
    """The cache of a pass, which records the rotated keys and values that are added, `[B, K, T, d]` both."""

    def __init__(self, cache: Any, call: LayerCall):
        self._cache, self._call = cache, call

    def update(self, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Heads:
        self._call.own_heads = key, value
        return self._cache.update(key, value, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def _carried(entry: MemoryEntry, slot: Slot) -> tuple[CarriedKey, CarriedKey]:
    layer = entry.layers[slot.writer]
    return CarriedKey(entry.name, layer, f"{slot.source}_key"), CarriedKey(entry.name, layer, f"{slot.source}_value")


def normalised_keys(attention: nn.Module, keys: torch.Tensor) -> torch.Tensor:
    """Apply a family's key norm, per head or over all heads (OLMo 2), if any, to keys `[B, K, T, d]`."""
    norm: Any = next((getattr(attention, name) for name in KEY_NORMS if hasattr(attention, name)), None)
    if norm is None:
        return keys
    weight = getattr(norm, "weight", None)
    if weight is None or weight.shape[-1] == keys.shape[-1]:
        return norm(keys)
    by_token = norm(keys.transpose(1, 2).flatten(2))  # [B, T, K * d]
    return by_token.unflatten(-1, (keys.shape[1], keys.shape[-1])).transpose(1, 2)


def _rotations_differ(config: PreTrainedConfig, layers: tuple[int, ...]) -> bool:
    kinds = getattr(config, "layer_types", None)
    parameters = getattr(config, "rope_parameters", None) or {}
    if kinds is None or not all(kind in parameters for kind in kinds):
        return False
    return len({kinds[layer] for layer in layers}) > 1


@register_layer(ModaOptions)
class ModaMemory(MemoryModule):
    """A layer's attention over the depth: a gate per head, and projections of the slots that it writes."""

    sites = (ModaSite,)

    options: ModaOptions

    def __init__(self, options: ModaOptions, sizes: ModelSizes):
        super().__init__(options, sizes)
        self.kv_heads = sizes.num_key_value_heads

    @classmethod
    def check_attention(cls, implementation: str | None) -> None:
        """Refuse an implementation that does not return the log-sum-exp of its softmax."""
        require_log_sum_exp(implementation)

    def forward(self, read: torch.Tensor, *, slot: SlotSource | None = None, **depth: Any) -> Any:
        """Write a slot, or read the slots of earlier layers.

        Return a key and a value, each `[B, K, T, d]`, before norm and rotation; or the result of `attend`.

        Args:
            read: Hidden states `[B, T, D]` if a slot is written; else queries `[B, H, T, d]`, rotated as the slots are.
            slot: Source of the slot to write. Default: none, slots are read.
            depth: Arguments of `attend` other than the queries, if slots are read.
        """
        if slot is None:
            return self.attend(read, **depth)
        return tuple(self._project(read, f"{slot}_{part}") for part in ("key", "value"))

    def _project(self, read: torch.Tensor, name: str) -> torch.Tensor:
        projected = getattr(self, name)(read)
        if self.options.bias:
            projected = projected + getattr(self, f"{name}_bias")
        return projected.unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)

    def attend(
        self,
        query: torch.Tensor,
        *,
        sequence: SequenceHeads,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
    ) -> HeadsOutput:
        """Attend to the sequence and to the slots, and join both results (`joint_attention`).

        Return the output of the heads, `[B, T, H, d]`, and attention weights to the sequence, if known, which sum to 1 minus the
        weight of the depth.

        Args:
            query: `[B, H, T, d]`, rotated as the keys of the slots are.
            sequence: The layer's attention to the sequence.
            keys: Like `values` n tensors `[B, K, T, d]`, from the oldest slot to the newest.
            values: The values of these slots.
        """
        output, weights, lse = sequence.with_log_sum()
        read, depth_lse = depth_attention(query, keys, values, sequence.scaling, sequence.softcap)
        gate = lse.new_ones(read.shape[1]) if self.gate is None else self.gate  # [H]
        gate = gate[:, None].expand_as(depth_lse)
        joined = joint_attention(output.transpose(1, 2), lse, read, depth_lse, gate, self.is_added)
        if weights is not None:
            of_sequence, _ = join_factors(lse, depth_lse, gate, self.is_added)
            weights = weights * of_sequence.unsqueeze(-1).to(weights.dtype)
        return joined.transpose(1, 2), weights

    @property
    def gate(self) -> torch.Tensor | None:
        """The gate c of each head, `[H]`, from 0 to 1; None if c is always 1."""
        return None if self.options.joining == "joint" else _Bounded.apply(self.depth_gate)

    @property
    def is_added(self) -> bool:
        """True if heads also add their read of the depth, times 1 - c (`joining` is `added`)."""
        return self.options.joining == "added"


class _Bounded(torch.autograd.Function):
    """Numbers clamped to 0 ... 1; gradients pass, so a gate of 0 learns, unless a step leaves the range."""

    @staticmethod
    def forward(ctx: Any, raw: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(raw)
        return raw.clamp(0, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (raw,) = ctx.saved_tensors
        (gradient,) = gradients
        outward = ((raw <= 0) & (gradient > 0)) | ((raw >= 1) & (gradient < 0))
        return gradient.masked_fill(outward, 0)

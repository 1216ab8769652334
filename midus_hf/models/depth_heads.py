"""A layer's part in attention over the depth: the slots that it reads, and the slots that it writes for later layers."""

from collections.abc import Mapping
from typing import Any

import torch

from midus_hf.config.memories.depth_attention import DepthAttentionOptions, Slot, SlotSource
from midus_hf.config.memory_entries import MemoryEntry
from midus_hf.memory.sequence_heads import SequenceHeads
from midus_hf.models.adapted import Rotation, rotated, unrotated
from midus_hf.models.memory_inputs import Carried

# A key and a value per key/value head and token, both `[B, K, T, d]`.
Heads = tuple[torch.Tensor, torch.Tensor]


class DepthHeads:
    """Slots that a layer reads and writes in every pass.

    A slot and the queries that read the slot have the same position, so equal rotations of both cancel out. If layers of one
    memory rotate by different angles (Gemma 3), or some layers do not rotate (SmolLM3), slots and the queries that read them are
    left unrotated.

    Args:
        config: Config of the model.
        entry: The memory's entry in the config.
        layer: Index of the layer.
        some_do_not_rotate: Whether some layers of the type do not rotate queries and keys.
    """

    def __init__(self, config: Any, entry: MemoryEntry, layer: int, some_do_not_rotate: bool):
        assert isinstance(entry.options, DepthAttentionOptions), "memories that attend have slots"
        self.name, self.options, self.layers = entry.name, entry.options, entry.layers
        self.index = entry.layers.index(layer)
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
            some_do_not_rotate or _rotations_differ(config, entry.layers)
        )

    def _carried(self, index: int, source: SlotSource, part: str) -> Carried:
        return Carried(self.name, self.layers[index], f"{source}_{part}")

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


class DepthPass:
    """One pass through a layer that takes part in attention over the depth.

    Args:
        heads: Slots that the layer reads and writes.
        layer: The host layer.
        carried: Tensors that the layer takes from earlier layers.
        rotation: Cosines and sines of the pass at this layer.
    """

    def __init__(self, heads: DepthHeads, layer: Any, carried: Mapping[Carried, Any], rotation: Rotation | None):
        self._heads, self._layer, self._carried, self._rotation = heads, layer, carried, rotation
        self._memory, self._attention = layer.memories[heads.name], getattr(layer, layer.mixer_name)
        self._input: torch.Tensor | None = None
        self._raw_key: torch.Tensor | None = None
        self._own: Heads | None = None

    @property
    def reads(self) -> bool:
        """True if heads read slots, false if they read the sequence alone."""
        return bool(self._heads.slots)

    @property
    def wants_raw_key(self) -> bool:
        """True if later layers read the output of the key projection, before norm and rotation."""
        return self._reuses and self._heads.options.rope == "released"

    @property
    def wants_heads(self) -> bool:
        """True if later layers read the layer's own keys and values."""
        return self._reuses

    @property
    def _reuses(self) -> bool:
        return self._heads.options.attention_slots == "reused" and "attention" in self._heads.writes

    def note_input(self, hidden_states: torch.Tensor) -> None:
        """Take the input of attention, `[B, T, D]`."""
        self._input = hidden_states

    def note_raw_key(self, key: torch.Tensor) -> None:
        """Take the output of the key projection, `[B, T, K * d]`."""
        self._raw_key = key

    def note_heads(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Take the keys, rotated, and the values of the tokens of the pass, each `[B, K, T, d]`."""
        self._own = (key, value)

    def attend(self, sequence: SequenceHeads) -> tuple[torch.Tensor, torch.Tensor | None]:
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
        if self.wants_raw_key:
            assert self._raw_key is not None, "attention tells what its key projection gave"
            return _split(self._raw_key, value), value
        return unrotated(self._attention, key, self._rotation) if self._heads.without_rotation else key, value

    def _projected(self, source: SlotSource, read: torch.Tensor) -> Heads:
        key, value = self._memory(read, slot=source)  # [B, K, T, d]
        if self._heads.options.rope == "same":
            key = normalised_keys(self._attention, key)
            key = key if self._heads.without_rotation else rotated(self._attention, key, self._rotation)
        return key, value


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

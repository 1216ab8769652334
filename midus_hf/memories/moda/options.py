"""Mixture-of-depths attention: heads also read what earlier layers wrote at their token (section 2)."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from midus_hf.config.declared_tensors import ZEROS, DeclaredTensor, ModelSizes, Normal
from midus_hf.config.errors import RequestError
from midus_hf.config.options import option
from midus_hf.memories.flops import attention_products, attention_weights, linear
from midus_hf.memories.options import MemoryOptions, head_projections, package_only
from midus_hf.memories.registry import register_memory

_DEPTH_STD = 0.02

# `attention`: its keys and values, or other projections of its input. `ffn`: projections of the network's input.
SlotSource = Literal["attention", "ffn"]


class Slot(NamedTuple):
    """Key and value per key/value head and token that a layer writes for later layers."""

    writer: int  # number of the layer, from 0 among the layers that have the memory
    source: SlotSource


@register_memory("moda", default_name="depth-attention")
@dataclass(kw_only=True)
class ModaOptions(MemoryOptions):
    """Slots that layers write and later layers read, and how heads join the depth with the sequence."""

    sites = ("inside-attention",)
    attends = True

    joining: Literal["added", "interpolated", "joint"] = option(
        "added",
        "how heads join o_S, read from the sequence, with o_D, read from the depth; w is the depth's share of one softmax over both, "
        "and c a gate per head from 0 to 1 that starts at 0. added: (1 - c w) o_S + (1 - c + c w) o_D. interpolated: "
        "(1 - c w) o_S + c w o_D. joint: one softmax over both, as in the paper, no gate and no identity at the start",
    )
    attention_slots: Literal["reused", "projected", "none"] = option(
        "none",
        "which keys and values of attention later layers read. reused: the keys and values that attention computes. projected: "
        "separate projections of the same input. none: no slots of this kind",
    )
    ffn_slots: bool = option(
        True, "whether later layers read keys and values that are projected from the feed-forward network's input"
    )
    bias: bool = option(False, "whether the projections of slots have a bias")

    @property
    def sources(self) -> tuple[SlotSource, ...]:
        """Origins of the slots that every layer writes, in the order of writing."""
        attention: tuple[SlotSource, ...] = ("attention",) if self.attention_slots != "none" else ()
        return (*attention, "ffn") if self.ffn_slots else attention

    @property
    def projected(self) -> tuple[SlotSource, ...]:
        """Origins in `sources` whose keys and values have separate projections."""
        return tuple(source for source in self.sources if source == "ffn" or self.attention_slots == "projected")

    def slots_read(self, index: int) -> tuple[Slot, ...]:
        """Return the slots of earlier layers that a layer reads, from the oldest to the newest."""
        return tuple(Slot(layer, source) for layer in range(index) for source in self.sources)

    def layer_inputs(self, index: int) -> tuple[tuple[int, str], ...]:
        return tuple(
            (slot.writer, f"{slot.source}_{part}") for slot in self.slots_read(index) for part in ("key", "value")
        )

    def layer_outputs(self, index: int, count: int) -> tuple[str, ...]:
        written = self.sources if index + 1 < count else ()
        return tuple(f"{source}_{part}" for source in written for part in ("key", "value"))

    def tensors(self, sizes: ModelSizes) -> dict[str, DeclaredTensor]:
        width = sizes.num_key_value_heads * sizes.head_dim
        tensors: dict[str, DeclaredTensor] = {}
        if self.joining != "joint":
            tensors["depth_gate"] = DeclaredTensor((sizes.num_heads,), "gate", ZEROS)
        for source in self.projected:
            for part in ("key", "value"):
                # With `joining` `added`, zero values make the depth add zero at the start.
                initial = ZEROS if self.joining == "added" and part == "value" else Normal(_DEPTH_STD)
                shape = (width, sizes.hidden_size)
                tensors[f"{source}_{part}.weight"] = DeclaredTensor(shape, "projection", initial)
                if self.bias:
                    tensors[f"{source}_{part}_bias"] = DeclaredTensor((width,), "projection", ZEROS)
        return tensors

    def layer_projections(self, sizes: ModelSizes) -> dict[str, tuple[int, int]]:
        return head_projections(sizes)

    def tensors_at(self, sizes: ModelSizes, index: int, count: int) -> dict[str, DeclaredTensor]:
        """Return a layer's tensors: the first layer reads no slots, and nobody reads the last layer's."""
        return {
            name: tensor
            for name, tensor in self.tensors(sizes).items()
            if (index > 0 if name == "depth_gate" else index + 1 < count)
        }

    def check(self) -> None:
        if not self.sources:
            raise RequestError(
                "attention_slots is 'none' and ffn_slots is false; expected one of them, for there is nothing to read."
            )

    def check_layers(self, layers: tuple[int, ...]) -> None:
        if len(layers) < 2:
            raise RequestError(
                f"layers is {list(layers)}; expected two or more, for a layer reads what another in front of it wrote."
            )

    @package_only
    def flops(self, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int) -> dict[str, int]:
        slots, width = len(self.slots_read(index)), sizes.num_heads * sizes.head_dim
        written = len(self.projected) if index + 1 < count else 0
        key_width = sizes.num_key_value_heads * sizes.head_dim
        return {
            "depth attention": attention_products(batch, tokens, slots, width)
            + attention_weights(batch, sizes.num_heads, tokens, slots),
            "slot projections": 2 * written * linear(batch * tokens, sizes.hidden_size, key_width, self.bias),
        }

"""Mixture-of-depths attention (MoDA): heads that also read what earlier layers wrote at their own position (section 2)."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from midus_config.declared_tensors import ZEROS, DeclaredTensor, Normal
from midus_config.flops.rules import attention_products, attention_weights, linear
from midus_config.memory_types import MemoryOptions, register_memory_type
from midus_config.model_sizes import ModelSizes
from midus_config.options import option

_STD = 0.02

SlotSource = Literal["attention", "ffn"]
"""What wrote a slot: attention, its own keys and values or others of the same input, or a projection of what the feed-forward
network reads."""


class Slot(NamedTuple):
    """A key and a value per key/value head and token, which a layer writes for later ones.

    Args:
        writer: Index of the layer that writes it, among those that have the memory.
        source: What wrote it.
    """

    writer: int
    source: SlotSource


@register_memory_type("depth-attention")
@dataclass(kw_only=True)
class DepthAttentionOptions(MemoryOptions):
    """Which slots layers write, which of them later layers read, and what they weigh in the softmax over both."""

    sites = ("inside-attention",)
    attends = True

    depth_weight: Literal["mixed", "multiplied", "one"] = option(
        "mixed",
        "what the depth weighs. mixed: a per head, from 0 to 1, by which heads go from what they read of the sequence to what they "
        "read of both. multiplied: g per head, not negative, by which the depth's part of the softmax is multiplied. Both are 0 at "
        "the start. one: as in the paper, no identity at the start",
    )
    attention_slots: Literal["reused", "projected", "none"] = option(
        "reused",
        "keys and values of attention that later layers read. reused: its own. projected: others of the same input",
    )
    ffn_slots: bool = option(
        True, "whether keys and values are projected from what the feed-forward network reads as well"
    )
    bias: bool = option(False, "whether the projections of slots have a bias")
    rope: Literal["same", "released"] = option(
        "same",
        "how slots meet queries. same: rotated alike, so that the position cancels out. released: keys as they are in front of their "
        "norm and rotation, as in the paper's code",
    )
    slots: int = option(0, "S, the slots that a token reads at most; 0: all")
    keep: Literal["last", "best", "hybrid"] = option(
        "last",
        "which S slots are kept. last: the newest. best: those that got most of the attention so far. hybrid: half of each",
    )

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError(
                "attention_slots is 'none' and ffn_slots is false; expected one of them, for there is nothing to read."
            )
        if self.slots < 0:
            raise ValueError(f"slots is {self.slots}; expected 0 or more.")
        if self.keep != "last" and self.slots < self.least_slots:
            raise ValueError(
                f"slots is {self.slots}, and keep is {self.keep!r}; expected {self.least_slots} or more: what the layer "
                "in front wrote is always read, and of the others some."
            )

    @property
    def sources(self) -> tuple[SlotSource, ...]:
        """What writes slots in every layer, in the order that they are written."""
        attention: tuple[SlotSource, ...] = ("attention",) if self.attention_slots != "none" else ()
        return (*attention, "ffn") if self.ffn_slots else attention

    @property
    def projected(self) -> tuple[SlotSource, ...]:
        """Those of `sources` that have projections of their own."""
        return tuple(source for source in self.sources if source == "ffn" or self.attention_slots == "projected")

    @property
    def least_slots(self) -> int:
        """The fewest slots among which some can be chosen."""
        return len(self.sources) + 1

    @property
    def num_newest(self) -> int:
        """How many of the newest slots are kept whatever attention they got."""
        written = len(self.sources)
        return {"last": self.slots, "best": written, "hybrid": max(written, self.slots // 2)}[self.keep]

    @property
    def chooses(self) -> bool:
        """Whether the slots that are kept follow from the attention they got, so that tokens keep different ones."""
        return bool(self.slots) and self.keep != "last"

    def num_read(self, index: int) -> int:
        """How many slots a layer reads."""
        written = len(self.sources) * index
        return min(written, self.slots) if self.slots else written

    def slots_read(self, index: int) -> tuple[Slot, ...]:
        """The slots that a layer reads of those that others wrote, from the oldest to the newest.

        Where it `chooses`, only those that the layer in front wrote: of older ones, it reads what was kept.
        """
        first = max(index - 1, 0) if self.chooses else 0
        written = [Slot(layer, source) for layer in range(first, index) for source in self.sources]
        return tuple(written[-self.slots :] if self.slots and not self.chooses else written)

    def is_read(self, slot: Slot, count: int) -> bool:
        """Whether one of `count` layers reads a slot."""
        return slot.writer + 1 < count and slot in self.slots_read(slot.writer + 1)

    def takes(self, index: int) -> tuple[tuple[int, str], ...]:
        read = tuple(
            (slot.writer, f"{slot.source}_{part}") for slot in self.slots_read(index) for part in ("key", "value")
        )
        kept = tuple((index - 1, part) for part in KEPT) if self.chooses and index > 1 else ()
        return (*kept, *read)

    def gives(self, index: int, count: int) -> tuple[str, ...]:
        kept = KEPT if self.chooses and 0 < index < count - 1 else ()
        written = (source for source in self.sources if self.is_read(Slot(index, source), count))
        return (*kept, *(f"{source}_{part}" for source in written for part in ("key", "value")))

    def given_shape(self, name: str, sizes: ModelSizes, index: int, batch: int, tokens: int) -> tuple[int, ...]:
        kept = (self.num_read(index + 1) - len(self.sources),) if name in KEPT else ()
        if name == "utilities":
            return (batch, tokens, *kept)
        return (batch, sizes.num_key_value_heads, tokens, *kept, sizes.head_dim)

    def check_layers(self, layers: tuple[int, ...]) -> None:
        if len(layers) < 2:
            raise ValueError(
                f"layers is {list(layers)}; expected two or more, for a layer reads what another in front of it wrote."
            )
        most = len(self.sources) * (len(layers) - 1)
        if self.slots > most:
            raise ValueError(
                f"slots is {self.slots}; expected {most} or fewer, which is what the last of {len(layers)} layers can read, or 0 "
                "for all of them."
            )

    def tensors(self, sizes: ModelSizes) -> dict[str, DeclaredTensor]:
        width = sizes.num_key_value_heads * sizes.head_dim
        tensors: dict[str, DeclaredTensor] = {}
        if self.depth_weight != "one":
            tensors["depth_weight"] = DeclaredTensor((sizes.num_heads,), "gate", ZEROS)
        for source in self.projected:
            for part in ("key", "value"):
                shape = (width, sizes.hidden_size)
                tensors[f"{source}_{part}.weight"] = DeclaredTensor(shape, "projection", Normal(_STD))
                if self.bias:
                    tensors[f"{source}_{part}_bias"] = DeclaredTensor((width,), "projection", ZEROS)
        return tensors

    def tensors_at(self, sizes: ModelSizes, index: int, count: int) -> dict[str, DeclaredTensor]:
        """Those of `tensors` that are used: the first layer reads nothing, and of the last nothing is read."""
        unread = tuple(f"{source}_" for source in self.sources if not self.is_read(Slot(index, source), count))
        return {
            name: tensor
            for name, tensor in self.tensors(sizes).items()
            if (index > 0 if name == "depth_weight" else not name.startswith(unread))
        }

    def flops(self, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int) -> dict[str, int]:
        slots, width = self.num_read(index), sizes.num_heads * sizes.head_dim
        written = sum(1 for source in self.projected if self.is_read(Slot(index, source), count))
        key_width = sizes.num_key_value_heads * sizes.head_dim
        return {
            "depth attention": attention_products(batch, tokens, slots, width)
            + attention_weights(batch, sizes.num_heads, tokens, slots),
            "slot projections": 2 * written * linear(batch * tokens, sizes.hidden_size, key_width, self.bias),
        }


KEPT = ("kept_keys", "kept_values", "utilities")
"""What a layer that `chooses` gives to the next: slots that were kept, and the attention that each got so far."""

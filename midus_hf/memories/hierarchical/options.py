"""Hierarchical memories: parameters that a text fetches from a bank, one block per level of a tree of topics (section 2)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from midus_hf.config.declared_tensors import ZEROS, DeclaredTensor, Role, TruncatedNormal, Uniform
from midus_hf.config.errors import RequestError
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.config.options import option
from midus_hf.memories.entries import Memories
from midus_hf.memories.hierarchical.blocks import BankLayout, FetchedBlocks
from midus_hf.memories.options import MemoryOptions, head_projections
from midus_hf.memories.registry import register_memory

_BLOCK_STD = 0.02
_MOST_LEAVES = 2**63


@dataclass(kw_only=True)
class HierarchicalOptions(MemoryOptions):
    """Sizes of blocks, and the memory of a text that comes without block ids.

    A block adds zero at the start: of the two factors of every product, one is zero and the other random (appendix I).
    """

    sizes: list[int] = option(
        [256, 64, 16, 0], "r_1 to r_p, the size of a block of each level of the tree; 0: the level has none"
    )
    branching: int = option(16, "k, children of each node of the tree: level l has k ** l blocks")
    without_ids: Literal["none", "generic"] = option(
        "none", "memory that a text without memory_ids reads. none: no memory; generic: the generic memory"
    )

    @property
    def fetched_size(self) -> int:
        """r_1 + ... + r_p, the size of all blocks that a text fetches."""
        return sum(self.sizes)

    def tensors(self, sizes: ModelSizes) -> dict[str, DeclaredTensor]:
        return {}

    def block(self, sizes: ModelSizes, size: int) -> dict[str, DeclaredTensor]:
        """Return the tensors that a block of `size` has in one layer."""
        raise TypeError(f"{type(self).__name__} does not say which tensors a block has.")

    def fetched(self, sizes: ModelSizes) -> FetchedBlocks:
        levels = tuple(self.block(sizes, size) if size else {} for size in self.sizes)
        return FetchedBlocks(self.branching, levels, self.without_ids)

    def check_beside(self, name: str, others: Mapping[str, MemoryOptions]) -> None:
        for other, options in others.items():
            if not isinstance(options, HierarchicalOptions):
                continue
            this, first = ((each.branching, len(each.sizes)) for each in (self, options))
            if this != first:
                raise RequestError(
                    f"memory {name!r} fetches blocks by a tree of branching {this[0]} and {this[1]} levels, and {other!r} by one of "
                    f"branching {first[0]} and {first[1]} levels; expected one tree, by whose nodes a text fetches from both."
                )

    def check(self) -> None:
        if self.branching < 2:
            raise RequestError(f"branching is {self.branching}; expected 2 or more.")
        if not self.sizes or any(size < 0 for size in self.sizes) or not any(self.sizes):
            raise RequestError(
                f"sizes is {self.sizes}; expected a size for each level of the tree, 0 or more, and not all of them 0, such as "
                "[256, 64, 16, 0]."
            )
        if self.branching ** len(self.sizes) > _MOST_LEAVES:
            raise RequestError(
                f"branching is {self.branching} and sizes has {len(self.sizes)} levels, which make more leaves than memory_ids, "
                "int64, can name; expected at most 2 ** 63. Lower branching, or give fewer sizes."
            )


@register_memory("hier-ffn")
@dataclass(kw_only=True)
class HierFFNOptions(HierarchicalOptions):
    """FFN memories: r more hidden units of the gated feed-forward network, `3 * r * D` parameters per layer (figure 18)."""

    sites = ("beside-ffn",)

    def block(self, sizes: ModelSizes, size: int) -> dict[str, DeclaredTensor]:
        return {
            "gate": DeclaredTensor((size, sizes.hidden_size), "key", TruncatedNormal(_BLOCK_STD)),
            "up": DeclaredTensor((size, sizes.hidden_size), "key", TruncatedNormal(_BLOCK_STD)),
            "down": DeclaredTensor((sizes.hidden_size, size), "value", ZEROS),
        }


@dataclass(kw_only=True)
class HierLoraOptions(HierarchicalOptions):
    """LoRA memories: `alpha * B A x` is added to a projection's output, with A of rank r and B zero at the start (appendix I)."""

    alpha: float = option(2.0, "number by which the product of both factors is multiplied")

    def block(self, sizes: ModelSizes, size: int) -> dict[str, DeclaredTensor]:
        tensors: dict[str, DeclaredTensor] = {}
        roles: tuple[Role, Role] = ("key", "value")
        for name, (inputs, outputs) in self.layer_projections(sizes).items():
            # Kaiming's uniform distribution with a = sqrt(5), like the first factor in LoRA.
            tensors[f"{name}_down"] = DeclaredTensor((size, inputs), roles[0], Uniform(inputs**-0.5))
            tensors[f"{name}_up"] = DeclaredTensor((outputs, size), roles[1], ZEROS)
        return tensors

    def check(self) -> None:
        super().check()
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise RequestError(f"alpha is {self.alpha!r}; expected a number above 0.")


@register_memory("hier-lora-qk")
@dataclass(kw_only=True)
class HierLoraQKOptions(HierLoraOptions):
    """LoRA memories of the query and key projections (figure 14)."""

    sites = ("inside-attention",)

    def layer_projections(self, sizes: ModelSizes) -> dict[str, tuple[int, int]]:
        d = sizes.head_dim
        return {
            "query": (sizes.hidden_size, sizes.num_heads * d),
            "key": (sizes.hidden_size, sizes.num_key_value_heads * d),
        }


@register_memory("hier-lora-vo")
@dataclass(kw_only=True)
class HierLoraVOOptions(HierLoraOptions):
    """LoRA memories of the value and output projections (figure 15)."""

    sites = ("inside-attention",)

    def layer_projections(self, sizes: ModelSizes) -> dict[str, tuple[int, int]]:
        d = sizes.head_dim
        return {
            "value": (sizes.hidden_size, sizes.num_key_value_heads * d),
            "output_projection": (sizes.num_heads * d, sizes.hidden_size),
        }


@register_memory("hier-lora-ffn")
@dataclass(kw_only=True)
class HierLoraFFNOptions(HierLoraOptions):
    """LoRA memories of the three projections of the feed-forward network (figure 16)."""

    sites = ("inside-ffn",)

    def layer_projections(self, sizes: ModelSizes) -> dict[str, tuple[int, int]]:
        hidden, inner = sizes.hidden_size, sizes.intermediate_size
        return {"gate": (hidden, inner), "up": (hidden, inner), "down": (inner, hidden)}


@register_memory("hier-kv")
@dataclass(kw_only=True)
class HierKVOptions(HierarchicalOptions):
    """KV memories: every head also attends to r keys and values, without positions and without a causal mask (figure 17).

    The memory has K heads, as many as the model has key/value heads, so `2 * r * K * d` parameters per layer.
    """

    sites = ("inside-attention",)

    def block(self, sizes: ModelSizes, size: int) -> dict[str, DeclaredTensor]:
        shape = (size, sizes.num_key_value_heads, sizes.head_dim)
        return {
            "memory_keys": DeclaredTensor(shape, "key", TruncatedNormal(_BLOCK_STD)),
            "memory_values": DeclaredTensor(shape, "value", ZEROS),
        }

    def layer_projections(self, sizes: ModelSizes) -> dict[str, tuple[int, int]]:
        return head_projections(sizes)


def block_layouts(memories: Memories) -> dict[str, BankLayout]:
    """Return the layouts of the banks of a model's memories that fetch blocks, by the name of the memory."""
    return {
        name: BankLayout(entry.options.type, entry.layers, entry.options.fetched(memories.sizes), memories.base)
        for name, entry in memories.attached.items()
        if isinstance(entry.options, HierarchicalOptions)
    }

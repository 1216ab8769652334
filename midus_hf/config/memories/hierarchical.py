"""Hierarchical memories: parameters that a text fetches from a bank, one block per level of a tree of topics (section 2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from midus_hf.config.declared_tensors import ZEROS, DeclaredTensor, Role, TruncatedNormal, Uniform
from midus_hf.config.fetched_blocks import FetchedBlocks
from midus_hf.config.memory_types import MemoryOptions, register_memory_type
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.config.options import option

_STD = 0.02


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
        one, two = (self.block(sizes, size) for size in (1, 2))
        along = {name: _dimension_that_differs(tensor.shape, two[name].shape) for name, tensor in one.items()}
        return FetchedBlocks(self.branching, levels, self.without_ids, along)


def _dimension_that_differs(shape: Sequence[int], other: Sequence[int]) -> int:
    (dimension,) = (index for index, (one, two) in enumerate(zip(shape, other, strict=True)) if one != two)
    return dimension


@register_memory_type("hier-ffn")
@dataclass(kw_only=True)
class HierFFNOptions(HierarchicalOptions):
    """FFN memories: r more hidden units of the gated feed-forward network, `3 * r * D` parameters per layer (figure 18)."""

    sites = ("beside-ffn",)

    def block(self, sizes: ModelSizes, size: int) -> dict[str, DeclaredTensor]:
        return {
            "gate": DeclaredTensor((size, sizes.hidden_size), "key", TruncatedNormal(_STD)),
            "up": DeclaredTensor((size, sizes.hidden_size), "key", TruncatedNormal(_STD)),
            "down": DeclaredTensor((sizes.hidden_size, size), "value", ZEROS),
        }


@dataclass(kw_only=True)
class HierLoraOptions(HierarchicalOptions):
    """LoRA memories: `alpha * B A x` is added to a projection's output, with A of rank r and B zero at the start (appendix I)."""

    alpha: float = option(2.0, "number by which the product of both factors is multiplied")

    def layer_projections(self, sizes: ModelSizes) -> dict[str, tuple[int, int]]:
        """Return the input and output width of each adapted projection, by the projection's name."""
        raise TypeError(f"{type(self).__name__} does not say which projections it adapts.")

    def block(self, sizes: ModelSizes, size: int) -> dict[str, DeclaredTensor]:
        tensors: dict[str, DeclaredTensor] = {}
        roles: tuple[Role, Role] = ("key", "value")
        for name, (inputs, outputs) in self.layer_projections(sizes).items():
            # Kaiming's uniform distribution with a = sqrt(5), like the first factor in LoRA.
            tensors[f"{name}_down"] = DeclaredTensor((size, inputs), roles[0], Uniform(inputs**-0.5))
            tensors[f"{name}_up"] = DeclaredTensor((outputs, size), roles[1], ZEROS)
        return tensors


@register_memory_type("hier-lora-qk")
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


@register_memory_type("hier-lora-vo")
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


@register_memory_type("hier-lora-ffn")
@dataclass(kw_only=True)
class HierLoraFFNOptions(HierLoraOptions):
    """LoRA memories of the three projections of the feed-forward network (figure 16)."""

    sites = ("inside-ffn",)

    def layer_projections(self, sizes: ModelSizes) -> dict[str, tuple[int, int]]:
        hidden, inner = sizes.hidden_size, sizes.intermediate_size
        return {"gate": (hidden, inner), "up": (hidden, inner), "down": (inner, hidden)}


@register_memory_type("hier-kv")
@dataclass(kw_only=True)
class HierKVOptions(HierarchicalOptions):
    """KV memories: every head also attends to r keys and values, without positions and without a causal mask (figure 17).

    The memory has K heads, as many as the model has key/value heads, so `2 * r * K * d` parameters per layer.
    """

    sites = ("inside-attention",)

    def block(self, sizes: ModelSizes, size: int) -> dict[str, DeclaredTensor]:
        shape = (size, sizes.num_key_value_heads, sizes.head_dim)
        return {
            "memory_keys": DeclaredTensor(shape, "key", TruncatedNormal(_STD)),
            "memory_values": DeclaredTensor(shape, "value", ZEROS),
        }

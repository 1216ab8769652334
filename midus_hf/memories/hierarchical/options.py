"""Hierarchical memories: parameters fetched from a bank, by levels of a tree of topics (section 2)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from midus_hf.config.declared_tensors import ZEROS, DeclaredTensor, ModelSizes, TruncatedNormal, Uniform
from midus_hf.config.errors import RequestError
from midus_hf.config.options import option
from midus_hf.memories.flops import ACTIVATIONS, attention_products, attention_weights, linear
from midus_hf.memories.options import MemoryOptions, definition_in, head_projections, package_only
from midus_hf.memories.registry import Memories, register_memory

# Number of the node of a generic memory.
GENERIC = -1

_BLOCK_STD = 0.02
_MAX_LEAVES = 2**63


def level_file(level: int) -> str:
    """Return the file name of a level, counted from 1."""
    return f"level-{level}.safetensors"


@dataclass(frozen=True)
class FetchedBlocks:
    """Blocks of a memory. A text fetches one block per level of a tree (section 2.1)."""

    branching: int  # k, children of each node of the tree; level l, counted from 1, has `k ** l` nodes
    # for each level, the tensors of a block in one layer, by name, if any
    levels: tuple[Mapping[str, DeclaredTensor], ...]
    without_ids: Literal["none", "generic"] = "none"  # blocks for a text that comes without block ids
    # nodes of the first level of a tree that has grown; level l then has `roots * k ** (l - 1)`
    roots: int | None = None

    def nodes(self, level: int) -> int:
        """Return the number of nodes of a level, counted from 1; each has a block, if the level has blocks."""
        return (self.roots or self.branching) * self.branching ** (level - 1)

    def path(self, leaf: int) -> tuple[int, ...]:
        """Return the nodes on the way to a leaf: one per level, the leaf itself last."""
        depth = len(self.levels)
        return tuple(leaf // self.branching ** (depth - level) for level in range(1, depth + 1))


@dataclass(frozen=True)
class BlockPlace:
    """Position of a tensor in a block's record: layer, name, and the number of elements before it."""

    layer: int
    name: str
    start: int
    tensor: DeclaredTensor

    @property
    def numel(self) -> int:
        """Number of elements in the tensor."""
        return math.prod(self.tensor.shape)


@dataclass(frozen=True)
class BankLayout:
    """Layout of a memory's bank in files: one record per block, with the tensors of all layers.

    The first record of each level is a block of the generic memory, which a text without block ids can read (section 4).
    """

    memory_type: str
    layers: tuple[int, ...]  # indices of the layers that have the memory, ascending
    blocks: FetchedBlocks  # of each layer
    base: str | None = None  # SHA-256 of the weights that the model was upscaled from, if known
    levels: list[int] = field(init=False, repr=False, compare=False)
    # Positions of the tensors in a record, layer by layer, for each level that has blocks.
    records: dict[int, tuple[BlockPlace, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", [level for level, tensors in enumerate(self.blocks.levels, 1) if tensors])
        object.__setattr__(self, "records", {level: self._record(level) for level in self.levels})

    def _record(self, level: int) -> tuple[BlockPlace, ...]:
        places, start = [], 0
        for layer in self.layers:
            for name, tensor in self.blocks.levels[level - 1].items():
                places.append(BlockPlace(layer, name, start, tensor))
                start += places[-1].numel
        return tuple(places)

    def with_roots(self, roots: int | None) -> "BankLayout":
        """Return the layout for a tree that has grown to `roots` nodes of the first level; None: not grown."""
        return replace(self, blocks=replace(self.blocks, roots=roots))

    @property
    def num_levels(self) -> int:
        """p, the number of levels of the tree, including levels without blocks."""
        return len(self.blocks.levels)

    def record_numel(self, level: int) -> int:
        """Return s_l, the number of elements in the record of a block."""
        return sum(place.numel for place in self.records[level])

    def num_records(self, level: int) -> int:
        """Return the number of records of a level: one per node, and the record of the generic memory."""
        return self.blocks.nodes(level) + 1

    @property
    def fetched(self) -> int:
        """Number of parameters that a text fetches, `|R(x; W)|`."""
        return sum(map(self.record_numel, self.levels))

    @property
    def bank(self) -> int:
        """Number of parameters in all blocks, `|W|`, without the generic memory."""
        return sum(self.record_numel(level) * self.blocks.nodes(level) for level in self.levels)

    def to_dict(self) -> dict[str, Any]:
        """Return the layout as plain data, which distinguishes the banks of different models."""
        return {
            "type": self.memory_type,
            "layers": list(self.layers),
            "base": self.base,
            "branching": self.blocks.branching,
            "levels": [
                {name: list(tensor.shape) for name, tensor in tensors.items()} for tensors in self.blocks.levels
            ],
        }

    def difference(self, data: Any) -> str | None:
        """Return the first difference from another layout, given as plain data, in words; None if they fit.

        Bases are compared only if both layouts know theirs.
        """
        if not isinstance(data, dict):
            return f"its layout is {data!r}"
        for key, value in self.to_dict().items():
            other = data.get(key)
            if other == value or (key == "base" and None in (other, value)):
                continue
            if key == "base":
                return (
                    f"its base, the weights that its model was upscaled from, has the digest {str(other)[:16]}...; expected "
                    f"{str(value)[:16]}..."
                )
            return f"its {key} is {other!r}; expected {value!r}"
        return None


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
        raise NotImplementedError

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
        if self.branching ** len(self.sizes) > _MAX_LEAVES:
            raise RequestError(
                f"branching is {self.branching} and sizes has {len(self.sizes)} levels, which make more leaves than memory_ids, "
                "int64, can name; expected at most 2 ** 63. Lower branching, or give fewer sizes."
            )

    @classmethod
    @package_only
    def memory_files(cls) -> Any:
        return definition_in("midus_hf.memories.hierarchical.bank_files", "BlockFiles")


@register_memory("hier-ffn")
@dataclass(kw_only=True)
class HierFFNOptions(HierarchicalOptions):
    """FFN memories: r more units of the gated network, `3 * r * D` parameters per layer (figure 18)."""

    sites = ("beside-ffn",)

    def block(self, sizes: ModelSizes, size: int) -> dict[str, DeclaredTensor]:
        return {
            "gate": DeclaredTensor((size, sizes.hidden_size), "key", TruncatedNormal(_BLOCK_STD)),
            "up": DeclaredTensor((size, sizes.hidden_size), "key", TruncatedNormal(_BLOCK_STD)),
            "down": DeclaredTensor((sizes.hidden_size, size), "value", ZEROS),
        }

    @package_only
    def flops(self, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int) -> dict[str, int]:
        rows, units = batch * tokens, self.fetched_size
        return {
            "memory": 3 * linear(rows, sizes.hidden_size, units) + rows * units * (ACTIVATIONS[sizes.activation] + 1),
            "residual adds": rows * sizes.hidden_size,
        }


@dataclass(kw_only=True)
class HierLoraOptions(HierarchicalOptions):
    """LoRA memories: `alpha * B A x` is added to a projection, A of rank r, B zero at first (appendix I)."""

    roles: ClassVar[tuple[str, ...]] = ()

    alpha: float = option(2.0, "number by which the product of both factors is multiplied")

    def layer_projections(self, sizes: ModelSizes) -> dict[str, tuple[int, int]]:
        hidden, inner = sizes.hidden_size, sizes.intermediate_size
        widths = {"query": (hidden, sizes.num_heads * sizes.head_dim), **head_projections(sizes)}
        widths |= {"gate": (hidden, inner), "up": (hidden, inner), "down": (inner, hidden)}
        return {role: widths[role] for role in self.roles}

    def block(self, sizes: ModelSizes, size: int) -> dict[str, DeclaredTensor]:
        tensors: dict[str, DeclaredTensor] = {}
        for name, (inputs, outputs) in self.layer_projections(sizes).items():
            tensors[f"{name}_down"] = DeclaredTensor((size, inputs), "key", Uniform(inputs**-0.5))
            tensors[f"{name}_up"] = DeclaredTensor((outputs, size), "value", ZEROS)
        return tensors

    def check(self) -> None:
        super().check()
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise RequestError(f"alpha is {self.alpha!r}; expected a number above 0.")

    @package_only
    def flops(self, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int) -> dict[str, int]:
        rows, rank = batch * tokens, self.fetched_size
        widths = self.layer_projections(sizes).values()
        return {
            "memory": sum(
                linear(rows, inputs, rank) + linear(rows, rank, outputs) + 2 * rows * outputs
                for inputs, outputs in widths
            )
        }


@register_memory("hier-lora-qk")
@dataclass(kw_only=True)
class HierLoraQKOptions(HierLoraOptions):
    """LoRA memories of the query and key projections (figure 14)."""

    sites = ("inside-attention",)
    roles = ("query", "key")


@register_memory("hier-lora-vo")
@dataclass(kw_only=True)
class HierLoraVOOptions(HierLoraOptions):
    """LoRA memories of the value and output projections (figure 15)."""

    sites = ("inside-attention",)
    roles = ("value", "output_projection")


@register_memory("hier-lora-ffn")
@dataclass(kw_only=True)
class HierLoraFFNOptions(HierLoraOptions):
    """LoRA memories of the three projections of the feed-forward network (figure 16)."""

    sites = ("inside-ffn",)
    roles = ("gate", "up", "down")


@register_memory("hier-kv")
@dataclass(kw_only=True)
class HierKVOptions(HierarchicalOptions):
    """KV memories: every head also attends to r keys and values, without positions or a mask (figure 17).

    They have the model's K key/value heads, so `2 * r * K * d` parameters per layer.
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

    @package_only
    def flops(self, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int) -> dict[str, int]:
        width = sizes.num_heads * sizes.head_dim
        return {
            "memory": attention_products(batch, tokens, self.fetched_size, width)
            + attention_weights(batch, sizes.num_heads, tokens, self.fetched_size),
            "residual adds": batch * tokens * width,
        }


def block_layouts(memories: Memories) -> dict[str, BankLayout]:
    """Return the layouts of the banks of a model's memories that fetch blocks, by the name of the memory."""
    return {
        name: BankLayout(entry.options.type, entry.layers, entry.options.fetched(memories.sizes), memories.base)
        for name, entry in memories.attached.items()
        if isinstance(entry.options, HierarchicalOptions)
    }
